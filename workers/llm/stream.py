"""An active request on a worker: what an engine's output means for it, the records about it, and
which KV of other workers it may use.

A prefill job ends with a hand-over, and an answer of one token is complete after prefill. A decode
job may repeat tokens that prefill has already sent. The work of a replica worker is a decode job
without KV. Pure; `active_requests.py` decides which record is due when, and sends it.

A KV handle is refused if it has expired, because its blocks may have another prompt by then; if its
worker has begun a new epoch since; if that worker's clock differs too much from this one's; and if
it is this worker's own, whose KV is in the prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from schemas.errors import EngineFailed, KvUnavailable
from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import (
    AnswerDelta,
    KvHandle,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    StreamEnd,
    StreamStart,
    TokenLogprob,
    WireError,
    Work,
    WorkPhase,
)
from schemas.rules.pairs import is_paired
from schemas.rules.phases import phase_of
from schemas.rules.sizes import check_deltas
from streams.log.clients import Headers
from workers.llm.engine import Output, ProbeTotals
from workers.llm.frames import FrameColumns
from workers.llm.parsing.parsers import AnswerParser, ParsedEnd
from workers.llm.stop_strings import certain_text

WHOLE = ("stop", "length")
NOTHING = ProbeTotals(probes=0, retrieved_tokens=0, stalled_ms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Name and epoch of this worker."""

    worker_id: str
    epoch: int


@dataclass(slots=True)
class Repetition:
    """Tokens of prefill that decode has sampled again; they wait for the first new one."""

    ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    deltas: Sequence[AnswerDelta] = ()


@dataclass(slots=True)
class KvBytes:
    """The KV of a prompt that was moved to or from this worker."""

    moved: int = 0
    prefix_read: int = 0  # that a pair's prefill worker has read from decode
    is_reported: bool = False


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """One phase of a request on this worker; `seq` and `chars` count from the answer's start.

    The fields after `started_ms` begin with the values of `work`. Those that are read for every
    token are fields of their own.
    """

    work: Work
    columns: FrameColumns
    headers: Headers
    prompt_tokens: int
    started_ms: int
    parser: AnswerParser | None = None  # if the answer is parsed; its rows then have no text
    request_id: str = field(init=False)
    attempt: int = field(init=False)
    job_id: str = field(init=False)  # its id inside the engine; each attempt has its own
    prefill: bool = field(init=False)
    paired: bool = field(init=False)  # prefill and decode worker have the attempt at once
    prior_tokens: int = field(init=False)  # of the answer, by earlier attempts, in the prompt
    seq: int = field(init=False)
    chars: int = field(init=False)
    first_token_ms: int = field(init=False)
    cached_tokens: int = field(init=False)
    repeats: bool = field(init=False)  # it samples tokens again that prefill has sent
    repetition: Repetition = field(default_factory=Repetition)
    kv: KvBytes = field(default_factory=KvBytes)
    probe_totals: ProbeTotals | None = None  # of the answer's searches

    def __post_init__(self) -> None:
        work = self.work
        self.request_id, self.attempt = work.request_id, work.attempt
        self.job_id = f"{work.request_id}.{work.attempt}"
        self.prefill = work.phase is WorkPhase.PREFILL
        self.paired = is_paired(work.orchestration)
        self.prior_tokens = self.seq = work.prior_tokens
        self.chars = work.prior_chars
        self.first_token_ms, self.cached_tokens = work.first_token_ms, work.cached_tokens
        self.repeats = work.first_seq > work.prior_tokens or work.first_char > work.prior_chars

    def take(self, probe_totals: ProbeTotals) -> None:
        """Set the totals of searches; a notice about passages leaves before any later token."""
        self.probe_totals = probe_totals
        if probe_totals.notice is not None:
            self.columns.add_notice(probe_totals.notice)

    @property
    def ends_request(self) -> bool:
        """Return whether this worker writes the outcome; of a pair, only the decode worker does."""
        return not (self.prefill and self.paired)


def _phase(stream: ActiveRequest, kind: PhaseKind, now_ms: int, **fields: Any) -> Phase:
    """Return a phase of the stream with the prompt's counts; `fields` are fields of Phase."""
    return phase_of(
        stream.work,
        kind,
        stream.started_ms,
        now_ms,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        **fields,
    )


def failed_phase(stream: ActiveRequest, error: WireError, now_ms: int) -> Phase:
    """Return the phase that gives a request back; the router places it again or ends it."""
    return _phase(stream, PhaseKind.FAILED, now_ms, kv_bytes=stream.kv.moved, error=error)


def allocated_phase(
    stream: ActiveRequest, identity: WorkerIdentity, kv: KvHandle, now_ms: int
) -> Phase:
    """Return the phase that reports decode's blocks for the prompt; a peer will write to them."""
    return _phase(stream, PhaseKind.KV_ALLOCATED, now_ms, kv=with_identity(kv, identity))


def handover_phase(
    stream: ActiveRequest,
    identity: WorkerIdentity,
    kv: KvHandle | None,
    transfer_ms: float,
    now_ms: int,
) -> Phase:
    """Return the phase that ends a prefill; its KV waits for a peer, or is there already."""
    return _phase(
        stream,
        PhaseKind.PREFILL_DONE,
        now_ms,
        sent_tokens=stream.seq,
        sent_chars=stream.chars,
        kv_bytes=stream.kv.moved,
        transfer_ms=transfer_ms,
        kv=None if kv is None else with_identity(kv, identity),
        kv_read_bytes=stream.kv.prefix_read,
    )


def kv_received_phase(stream: ActiveRequest, transfer_ms: float, now_ms: int) -> Phase:
    """Return the phase that reports that the prompt's KV has arrived."""
    return _phase(
        stream,
        PhaseKind.KV_RECEIVED,
        now_ms,
        kv_bytes=stream.kv.moved,
        transfer_ms=transfer_ms,
    )


def kv_missed_phase(stream: ActiveRequest, error: WireError, now_ms: int) -> Phase:
    """Return the phase that reports missing KV; this worker computes the prompt."""
    return _phase(stream, PhaseKind.KV_MISSED, now_ms, error=error)


def stream_start(stream: ActiveRequest, identity: WorkerIdentity) -> StreamStart:
    """Return the mode and the workers of the stream, as far as this worker knows them."""
    prefill_worker, decode_worker = _worker_ids(stream, identity)
    return StreamStart(
        request_id=stream.request_id,
        attempt=stream.attempt,
        mode=stream.work.mode,
        orchestration=stream.work.orchestration,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
    )


def outcome_of(
    stream: ActiveRequest,
    identity: WorkerIdentity,
    kind: OutcomeKind,
    now_ms: int,
    *,
    finish_reason: str = "",
    stop_reason: str = "",
    error: WireError | None = None,
    kv: KvHandle | None = None,
    deltas: Sequence[AnswerDelta] = (),
    reasoning_tokens: int = 0,
) -> tuple[StreamEnd, Outcome]:
    """Return the stream's end and the request's outcome.

    `seq` and `chars` of the end are 0 unless the answer is complete. The gateway then ends after
    the tokens that it has, which may be more than this attempt has repeated so far.
    """
    whole = kind is OutcomeKind.COMPLETED
    prefill_worker, decode_worker = _worker_ids(stream, identity)
    totals = stream.probe_totals or NOTHING
    prompt_tokens = stream.prompt_tokens - stream.prior_tokens
    both: dict[str, Any] = {
        "request_id": stream.request_id,
        "attempt": stream.attempt,
        "kind": kind,
        "finish_reason": finish_reason,
        "error": error,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": min(stream.cached_tokens, prompt_tokens),
        "mode": stream.work.mode,
        "prefill_worker": prefill_worker,
        "decode_worker": decode_worker,
        "kv_bytes": stream.kv.moved,
        "probes": totals.probes,
        "retrieved_tokens": totals.retrieved_tokens,
        "stalled_ms": totals.stalled_ms,
        "first_token_ms": stream.first_token_ms,
        "worker_ms": float(max(0, now_ms - stream.started_ms)),
        "reasoning_tokens": reasoning_tokens,
    }
    end = StreamEnd(
        seq=stream.seq if whole else 0,
        chars=stream.chars if whole else 0,
        stop_reason=stop_reason,
        deltas=deltas,
        **both,
    )
    outcome = Outcome(
        session_id=stream.work.session_id,
        written_by=identity.worker_id,
        completion_tokens=max(stream.seq, stream.work.first_seq),
        arrived_ms=stream.work.arrived_ms,
        ended_ms=now_ms,
        kv=None if kv is None else with_identity(kv, identity),
        orchestration=stream.work.orchestration,
        **both,
    )
    return end, outcome


def with_identity(kv: KvHandle, identity: WorkerIdentity) -> KvHandle:
    """Return the handle with this worker's name and epoch, which engines do not set."""
    return replace(kv, worker_id=identity.worker_id, worker_epoch=identity.epoch)


def _worker_ids(stream: ActiveRequest, identity: WorkerIdentity) -> tuple[str, str]:
    """Return the ids of prefill and decode worker, as far as this worker knows them."""
    work = stream.work
    if stream.prefill:
        return identity.worker_id, "" if work.kv_target is None else work.kv_target.worker_id
    if work.kv is None:  # the prompt was computed in place
        return identity.worker_id, identity.worker_id
    return work.prefill_worker or work.kv.worker_id, identity.worker_id


def decided_text(stream: ActiveRequest, output: Output) -> str:
    """Return the text of a prefill output that no later token can cut; all of it at the end."""
    if output.finish_reason in WHOLE:
        return output.text
    return certain_text(output.text, stream.work.sampling)


def finish(
    stream: ActiveRequest, output: Output, identity: WorkerIdentity, now_ms: int
) -> Phase | tuple[StreamEnd, Outcome]:
    """Return the records for the last output of a job: a hand-over, a complete answer or a failure.

    In a pair the prefill job's end is never an answer: the decode worker reaches the same end and
    writes the outcome. Raises the errors of the parser, and RecordTooLarge.
    """
    reason = output.finish_reason
    is_handover = reason == "handover" and output.kv is not None
    if stream.prefill and (is_handover or (stream.paired and reason in ("handover", *WHOLE))):
        return handover_phase(stream, identity, output.kv, output.transfer_ms, now_ms)
    if reason not in WHOLE:
        return failed_phase(stream, output.error or unexpected(stream, output).to_wire(), now_ms)
    parsed = ParsedEnd((), reason, 0) if stream.parser is None else stream.parser.finish(reason)
    check_deltas(stream.request_id, parsed.deltas)
    return outcome_of(
        stream,
        identity,
        OutcomeKind.COMPLETED,
        now_ms,
        finish_reason=parsed.finish_reason,
        stop_reason=output.stop_reason,
        kv=None if stream.prefill else output.kv,
        deltas=parsed.deltas,
        reasoning_tokens=parsed.reasoning_tokens,
    )


def unexpected(stream: ActiveRequest, output: Output) -> EngineFailed:
    """Return the error for an end that the engine did not explain."""
    return EngineFailed(
        f"request {stream.request_id}: {stream.work.phase} ended with {output.finish_reason!r}"
        f"{' and no KV handle' if output.finish_reason == 'handover' else ''}"
    )


def append_row(
    stream: ActiveRequest,
    output: Output,
    text: str,
    seq: int,
    chars: int,
    new_deltas: Sequence[AnswerDelta] = (),
) -> None:
    """Append an output that repeats prefill's tokens, or that has log-probabilities or deltas.

    Decode samples the first token again, and the gateway compares it with prefill's. Repeated
    tokens wait here for the first new one, so that they need no frame of their own.
    """
    earlier, work = stream.repetition, stream.work
    ids, full_text = [*earlier.ids, *output.token_ids], earlier.text + text
    logprobs = [*earlier.logprobs, *output.logprobs]
    deltas = [*earlier.deltas, *new_deltas]
    is_new = seq + len(output.token_ids) > work.first_seq or chars + len(text) > work.first_char
    if stream.repeats and not is_new and not output.finish_reason:
        stream.repetition = Repetition(ids, full_text, logprobs, deltas)
        return
    first_seq, first_char = seq - len(earlier.ids), chars - len(earlier.text)
    later, stream.repeats = stream.repeats, False
    if later:
        stream.repetition = Repetition()
    if not ids and not full_text:
        return
    stream.columns.row(
        stream.request_id, stream.attempt, first_seq, first_char, ids, full_text, later=later
    )
    if deltas:
        stream.columns.add_deltas(stream.request_id, deltas)
    if logprobs:
        stream.columns.add_logprobs(stream.request_id, logprobs)


def received_phase(stream: ActiveRequest, output: Output, now_ms: int) -> Phase | None:
    """Return the phase `kv_received` of a decode job, the first time; otherwise None.

    A prefill job reports its bytes when it is done; that of a pair, those read and those written.
    """
    if stream.prefill:
        if stream.paired and not output.finish_reason:
            stream.kv.prefix_read = output.kv_bytes
        else:
            stream.kv.moved = output.kv_bytes
        return None
    if stream.kv.is_reported or stream.work.kv is None:
        return None
    stream.kv.is_reported = True
    stream.kv.moved = output.kv_bytes
    return kv_received_phase(stream, output.transfer_ms, now_ms)


class Peers(Protocol):
    """This worker's view of other workers."""

    def epoch_of(self, worker_id: str) -> int:
        """Return the worker's latest epoch; 0 if it is unknown."""

    def clock_offset_ms(self, worker_id: str) -> int:
        """Return by how many ms its clock differs from this one's."""


def kv_fault(work: Work, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> str:
    """Return why the KV must not be fetched and the prompt is computed here; "" if it may.

    A prefill job's handle is for KV that the session's decode worker kept, a decode job's for KV
    that prefill computed.
    """
    return "" if work.kv is None else _fault(work.kv, identity, now_ms, peer_view)


def check_promise(work: Work, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> None:
    """Raise KvUnavailable if paired work has no usable handle of its peer."""
    if not is_paired(work.orchestration):
        return
    name = "kv_target" if work.phase is WorkPhase.PREFILL else "kv"
    promise = work.kv_target if work.phase is WorkPhase.PREFILL else work.kv
    fault = f"expected {name}, found none"
    if promise is not None:
        fault = _fault(promise, identity, now_ms, peer_view)
    if fault:
        raise KvUnavailable(
            f"request {work.request_id}, {work.phase} of {work.orchestration} on "
            f"{identity.worker_id}: {fault}"
        )


def _fault(kv: KvHandle, identity: WorkerIdentity, now_ms: int, peer_view: Peers) -> str:
    """Return what is wrong with a handle; "" if nothing."""
    if kv.worker_id == identity.worker_id:
        return "the peer is this worker itself"
    if kv.expires_at_ms <= now_ms:
        return f"the promise of {kv.worker_id} ended {now_ms - kv.expires_at_ms} ms ago"
    latest, offset_ms = peer_view.epoch_of(kv.worker_id), peer_view.clock_offset_ms(kv.worker_id)
    if kv.worker_epoch < latest:
        return f"{kv.worker_id} lives in epoch {latest}, the promise is of {kv.worker_epoch}"
    if offset_ms > CLOCK_MARGIN_MS:
        return (
            f"the clock of {kv.worker_id} differs by {offset_ms} ms, at most {CLOCK_MARGIN_MS} are "
            "taken; keep the hosts' clocks by NTP"
        )
    return ""
