"""Derives the steps of a request's story, in order of time, each as a line with details below.

Free of I/O; `trivium explain` and the demo print them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from infra.story import searches
from infra.story.story import Story
from schemas.records import (
    Candidate,
    Decision,
    Estimate,
    Mode,
    Outcome,
    Phase,
    PhaseKind,
    Reason,
    Request,
    Role,
    Work,
    WorkPhase,
)
from schemas.rules.tokens import token_count
from streams.core.requests.live import may_cancel

CANDIDATES_SHOWN, CALLS_SHOWN, EXCERPT_CHARS = 6, 8, 120
_ROUNDING = 1e-6
_NO_HOME = (Reason.FIRST_TURN, Reason.SESSION_WORKER_GONE)
_NO_ROOM = (Reason.SESSION_WORKER_FULL, Reason.PREFILL_QUEUE_LONG)


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One line of the story. `after_ms` counts from the request's arrival at its gateway, and is
    the end of a step that took time.
    """

    after_ms: int
    who: str
    what: str
    kind: str = ""
    took_ms: int = 0
    details: tuple[str, ...] = ()


def steps_of(story: Story) -> list[StoryStep]:
    """Return the steps in order of time."""
    start_ms = story.request.arrived_ms
    steps = [replace(step, after_ms=step.after_ms - start_ms) for step in _events(story)]
    return sorted(steps, key=lambda step: step.after_ms)


def _events(story: Story) -> Iterator[StoryStep]:
    """Yield the steps with their wall-clock times, in the order of cause and effect."""
    yield _request_step(story.request)
    for cancellation in story.cancellations:
        what = f"cancellation: {cancellation.reason.value}"
        if not may_cancel(cancellation, story.request):
            what += " (by another tenant: without effect)"
        yield StoryStep(cancellation.at_ms, story.request.gateway_id, what, "cancellation")
    for resumption in story.resumptions:
        yield StoryStep(
            resumption.at_ms, resumption.gateway_id, "answer resumed here", "resumption"
        )
    yield from _search_steps(story)
    for decision in story.decisions:
        yield _decision_step(decision)
    for work in story.work:
        yield _work_step(work)
    for stop in story.stops:
        void = " (void: no outcome)" if stop.void else ""
        yield StoryStep(stop.at_ms, "", f"told {stop.worker_id} to stop{void}", "work")
    for phase in story.phases:
        yield _phase_step(phase)
    yield from _tokens(story)
    if story.outcome is not None:
        yield _outcome_step(story.outcome, story)


def _request_step(request: Request) -> StoryStep:
    tokens = f"{token_count(request.prompt_tokens)} prompt tokens"
    what = f"accepted, {tokens}, at most {request.sampling.max_tokens} new"
    for name, wish in (("policy", request.policy), ("orchestration", request.orchestration)):
        what += f", wishes {name} {wish}" if wish else ""
    if request.retrieval is not None:
        what += searches.wish(request.retrieval, request.arrived_ms)
    if request.parsing is not None and request.parsing.tools:
        what += f", tool choice {request.parsing.tool_choice}"
    return StoryStep(request.arrived_ms, request.gateway_id, what, "request")


def _search_steps(story: Story) -> Iterator[StoryStep]:
    prompt_searches = [retrieved for retrieved in story.retrieved if not retrieved.probe]
    if prompt_searches:
        first, *late = prompt_searches
        what, took_ms = searches.outcome(first), max(0, first.at_ms - first.asked_ms)
        details = searches.details(story.request, first, len(late), story.warms)
        yield StoryStep(first.at_ms, first.router_id, what, "retrieval", took_ms, details)
    for probe in [retrieved for retrieved in story.retrieved if retrieved.probe]:
        what, details = searches.probe_step(probe)
        attempt = f" (attempt {probe.attempt})" if probe.attempt > 1 else ""
        took_ms = max(0, probe.at_ms - probe.asked_ms)
        yield StoryStep(probe.at_ms, probe.router_id, what + attempt, "probe", took_ms, details)


def _decision_step(decision: Decision) -> StoryStep:
    chosen = [worker for worker in (decision.prefill_worker, decision.decode_worker) if worker]
    where = f" {decision.mode.value} on {' and '.join(chosen)}" if chosen else ""
    orchestration = (
        f", {decision.orchestration.value}" if decision.orchestration.value != "none" else ""
    )
    attempt = f", attempt {decision.attempt}" if decision.attempt > 1 else ""
    policy = f" ({decision.policy})" if decision.policy else ""
    what = f"{decision.kind.value}{where}{orchestration}{attempt}: {decision.reason.value}{policy}"
    details = [", ".join(_situation(decision)), _unmet(decision)]
    if decision.estimate is not None:
        details += _estimate_lines(decision, decision.estimate)
    details += _candidates(decision)
    return StoryStep(
        decision.at_ms, decision.router_id, what, "decision", 0, tuple(filter(None, details))
    )


def _situation(decision: Decision) -> Iterator[str]:
    if decision.waited_ms or decision.queue_length:
        yield f"waited {decision.waited_ms} ms, {decision.queue_length} in the queue"
    if decision.slack_ms:
        yield f"slack {decision.slack_ms} ms"
    if decision.session_tokens:
        yield f"session holds {decision.session_tokens} tokens"
    if decision.load:
        yield f"load {decision.load:.2f}"
    if decision.w_ttft or decision.w_tpot:
        yield f"weights ttft {decision.w_ttft:g}, tpot {decision.w_tpot:g}"


def _unmet(decision: Decision) -> str:
    """Return a wish that was not met, and why."""
    wishes = [wish for wish in (decision.wished_policy, decision.wished_orchestration) if wish]
    return f"wished {' and '.join(wishes)}: {decision.unmet.value}" if wishes else ""


def _estimate_lines(decision: Decision, estimate: Estimate) -> Iterator[str]:
    """Yield the expected times of local and remote, where known, and each term of the score."""
    local_ms, remote_ms = estimate.ttft_local_ms, estimate.ttft_remote_ms
    if remote_ms:
        yield (
            f"expected local: TTFT {local_ms:.1f} ms, TPOT {estimate.tpot_local_ms:.2f} ms; "
            f"remote: TTFT {remote_ms:.1f} ms, TPOT {estimate.tpot_remote_ms:.2f} ms"
        )
    terms = (
        f"score {estimate.score:+.3f} = {decision.w_ttft:g} * TTFT gain {estimate.gain_ttft:+.3f} "
        f"- {decision.w_tpot:g} * TPOT loss {estimate.loss_tpot:+.3f}"
    )
    if decision.policy == "learned":
        terms += f" + KV price {estimate.kv_price:.3f}"
    yield f"{terms}; local above 0; {estimate.samples} samples"
    yield _not_by_score(decision, estimate)
    if remote_ms and estimate.gain_ttft < (remote_ms - local_ms) / remote_ms - _ROUNDING:
        yield "prompts that come later would wait behind it, which the TTFT gain counts too"


def _not_by_score(decision: Decision, estimate: Estimate) -> str:
    """Return the rule that decided in place of the score, or "" where the score decided."""
    local = decision.mode is Mode.LOCAL
    overruled = decision.policy_reason is not Reason.UNKNOWN
    reason = decision.policy_reason if overruled else decision.reason
    has_no_home = decision.reason in _NO_HOME
    if decision.reason in _NO_ROOM and overruled:
        rule = f"{decision.reason.value.replace('_', ' ')}, so it runs where there is room"
    elif reason is Reason.TOO_LITTLE_KNOWN and has_no_home:
        rule = "too little is known, and no worker holds its history, so it is remote"
    elif reason is Reason.TOO_LITTLE_KNOWN:
        rule = "too little is known, so its length and the prefill queue decide (conditional)"
    elif reason is Reason.EXPLORING:
        rule = "what is seldom chosen was tried, to learn its times"
    elif reason is Reason.LEARNED and local and estimate.score <= 0:
        rule = "this worker alone does what no prefill worker would do sooner"
    elif reason is Reason.LEARNED and not local and estimate.score > 0:
        rule = "a local first token would come too late for the deadline"
    else:
        return ""
    return f"the score was not used: {rule}"


def _candidates(decision: Decision) -> Iterator[str]:
    def is_chosen(candidate: Candidate) -> bool:
        prefills = candidate.role is Role.PREFILL
        return candidate.worker_id == (
            decision.prefill_worker if prefills else decision.decode_worker
        )

    candidates = sorted(decision.candidates, key=lambda candidate: not is_chosen(candidate))
    for candidate in candidates[:CANDIDATES_SHOWN]:
        mark = "→" if is_chosen(candidate) else " "
        yield (
            f"{mark} {candidate.worker_id} ({candidate.role.value}): {candidate.credits} credits, "
            f"{candidate.running} running, {candidate.work_ahead_tokens} tokens ahead, "
            f"{candidate.cached_tokens} cached"
        )
    if len(candidates) > CANDIDATES_SHOWN:
        yield f"  and {len(candidates) - CANDIDATES_SHOWN} more"


def _work_step(work: Work) -> StoryStep:
    where = "prefill" if work.phase is WorkPhase.PREFILL else "decode"
    details = []
    if work.kv is not None:
        blocks = f"{len(work.kv.block_ids)} blocks, " if work.kv.block_ids else ""
        details.append(f"KV of {work.kv.tokens} tokens from {work.kv.worker_id} ({blocks}once)")
    if work.kv_target is not None:
        count = work.kv_target.tokens
        details.append(f"KV goes to {work.kv_target.worker_id}, which holds {count} tokens of it")
    if work.probes is not None and work.probes.decided:
        put_in = [insert for insert in work.probes.inserts if insert.tokens]
        counts = f"{len(put_in)} of {work.probes.decided} probes"
        details.append(f"what {counts} of earlier attempts put in goes in again")
    what = f"dispatched {where} to {work.worker_id}"
    return StoryStep(work.dispatched_ms, work.router_id, what, "work", 0, tuple(details))


def _phase_step(phase: Phase) -> StoryStep:
    took_ms = max(0, phase.ended_ms - phase.started_ms)
    what = phase.kind.value.replace("_", " ")
    details: tuple[str, ...] = ()
    if phase.kind is PhaseKind.PREFILL_DONE:
        computed = phase.prompt_tokens - phase.cached_tokens
        what += f": {computed} tokens computed, {phase.cached_tokens} cached, {took_ms} ms"
        if phase.kv_read_bytes:
            details = (f"{phase.kv_read_bytes:,} bytes of that read from decode before",)
        details += (transfer_text(phase),) if phase.kv_bytes else ()
    elif phase.kind is PhaseKind.KV_RECEIVED:
        what += ": " + transfer_text(phase)
    elif phase.kind is PhaseKind.KV_MISSED:
        reason = phase.error.message if phase.error is not None else "no reason given"
        what += f": {reason}; the prompt is computed here"
    elif phase.kind is PhaseKind.KV_ALLOCATED:
        if phase.kv is not None:
            blocks = len(phase.kv.block_ids)
            what += f": {blocks} blocks, of which {phase.kv.tokens} tokens are held already"
    elif phase.error is not None:
        retriable = "retriable" if phase.error.retriable else "not retriable"
        what += f": {phase.error.message} ({phase.error.code}, {retriable})"
    return StoryStep(phase.ended_ms, phase.worker_id, what, "phase", took_ms, details)


def transfer_text(phase: Phase) -> str:
    """Return bytes, time and rate of a KV transfer; the passive peer does not know the time."""
    text = f"{phase.kv_bytes:,} bytes over NIXL"
    if phase.transfer_ms > 0:
        text += f" in {phase.transfer_ms:.1f} ms"
        if phase.kv_bytes:
            text += f", {phase.kv_bytes / phase.transfer_ms / 1e3:,.0f} MB/s"
    return text


def _tokens(story: Story) -> Iterator[StoryStep]:
    if not story.rows:
        return
    first, last, count = story.rows[0], story.rows[-1], len(story.token_ids)
    yield StoryStep(first.at_ms, first.worker_id, "first token on its way", "tokens")
    if count > 1 or story.request.parsing is not None:
        frames = "1 frame" if first is last else f"{len(story.rows)} frames"
        what = f"{count} tokens in {frames}, TPOT {story.tpot_ms or 0:.2f} ms"
        if story.repeated_rows:
            what += f"; {story.repeated_rows} repeated rows dropped"
        if story.differs_at is not None:
            what += f"; repeated otherwise from token {story.differs_at} on"
        took_ms = story.last_token_ms - first.at_ms
        details = tuple(_parsed_lines(story))
        yield StoryStep(story.last_token_ms, last.worker_id, what, "tokens", took_ms, details)


def _parsed_lines(story: Story) -> Iterator[str]:
    """Yield what the worker's parsers made of the answer; nothing if it is text."""
    if story.request.parsing is None:
        return
    answer = story.answer
    if answer.reasoning:
        count = f" ({story.reasoning_tokens} tokens)" if story.reasoning_tokens else ""
        yield f"reasoning{count}: {_excerpt(answer.reasoning)}"
    if answer.content:
        yield f"content: {_excerpt(answer.content)}"
    for call in list(answer.calls.values())[:CALLS_SHOWN]:
        yield f"calls {call.name} ({call.call_id}): {_excerpt(call.arguments)}"
    if len(answer.calls) > CALLS_SHOWN:
        yield f"and {len(answer.calls) - CALLS_SHOWN} calls more"


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARS else f"{line[:EXCERPT_CHARS]}…"


def _outcome_step(outcome: Outcome, story: Story) -> StoryStep:
    at_ms = outcome.ended_ms
    if story.rows and story.rows[-1].worker_id == outcome.written_by:
        at_ms = max(at_ms, story.last_token_ms)  # the outcome is written after its frame
    reason = f" ({outcome.finish_reason})" if outcome.finish_reason else ""
    what = f"{outcome.kind.value}{reason}: {outcome.completion_tokens} tokens"
    if outcome.probes:
        what += f", {outcome.probes} probes put in {outcome.retrieved_tokens} more"
        what += f" and stalled it for {outcome.stalled_ms:.0f} ms"
    if outcome.error is not None:
        what += f"; {outcome.error.code}: {outcome.error.message}"
    return StoryStep(at_ms, outcome.written_by, what, "outcome")
