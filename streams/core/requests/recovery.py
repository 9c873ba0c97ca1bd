"""Rebuilds one partition's live requests from the partition's records in the log.

Theory of operation. The records of a partition lie on several topics, whose relative order is
unknown, so the fold does not depend on it; only resumptions and cancellations share a topic. Per
request it keeps the latest attempt that was placed, whether that is void, its hand-over and phases,
a cancellation, and the outcome. The same `note` and `step` that the live state uses take an attempt
through its phases; a void attempt waits to be placed again, whatever its workers reported.
An outcome counts unless a later attempt was placed, as in the live state, so live state equals a
rebuild. A router may die after an outcome and before it writes the usage. The new router then
writes the usage, and voids the attempt on workers that may still run it.
To keep memory low, feed usage first, then outcomes: the fold then keeps no requests that ended.

Pure, and knows nothing of workers: `streams/core/router.py` checks whether the workers of a
request still live.
"""

from dataclasses import dataclass, field, replace

from schemas.records import (
    Cancellation,
    Continued,
    Decision,
    DecisionKind,
    Mode,
    Orchestration,
    Outcome,
    Phase,
    Reason,
    Request,
    Retrieved,
    Session,
    StreamEnd,
)
from schemas.rules.continuing import awaits_progress, prior_answer
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    OutcomeArrived,
    PartitionEvent,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
    SessionLoaded,
    UsageLoaded,
)
from streams.core.fleet.workers import Gateway, Life
from streams.core.requests.context import with_context
from streams.core.requests.live import (
    NOBODY,
    Attempt,
    LiveRequest,
    SessionKey,
    VoidAttempts,
    is_fault,
    is_loss,
    is_outdated,
    may_cancel,
    new_live_request,
    note,
    note_work,
    session_key,
    step,
    with_reader,
)
from streams.core.requests.probe_results import with_probe
from streams.core.states import BEGINS, State

PLACING = (DecisionKind.PLACE, DecisionKind.REPLACE)


@dataclass(frozen=True, slots=True)
class _Placing:
    """The fields of a decision that a rebuild needs."""

    attempt: int
    mode: Mode
    orchestration: Orchestration
    prefill: Life
    decode: Life


_UNPLACED = _Placing(0, Mode.NONE, Orchestration.NONE, NOBODY, NOBODY)


@dataclass(slots=True)
class _Trace:
    """The records of one request, as far as a rebuild needs them."""

    request: Request | None = None
    deadline_ms: int = 0
    placed: _Placing = _UNPLACED
    handed: _Placing = _UNPLACED
    void_attempt: int = 0  # the latest void attempt
    void_reason: Reason | None = None  # of that attempt
    faults: set[int] = field(default_factory=set)  # void attempts at which workers failed
    losses: set[int] = field(default_factory=set)  # void attempts by lost or refusing workers
    retrieved: Retrieved | None = None  # of the prompt's search, the first in the log
    probes: list[Retrieved] = field(default_factory=list)  # of searches during the answer
    continued: dict[int, Continued] = field(default_factory=dict)  # the first of each attempt
    read_ends: dict[int, StreamEnd] = field(default_factory=dict)  # by attempt
    phases: list[Phase] = field(default_factory=list)
    cancels: dict[str, Cancellation] = field(default_factory=dict)  # the first of each tenant
    resumed: list[Gateway] = field(default_factory=list)
    outcome: Outcome | None = None  # of the highest attempt
    is_told: bool = False  # its usage is in the log
    failed_tries: int = 0

    @property
    def outcome_attempt(self) -> int:
        return -1 if self.outcome is None else self.outcome.attempt

    @property
    def has_ended(self) -> bool:
        return self.outcome_attempt >= self.placed.attempt

    @property
    def is_over(self) -> bool:
        """Return whether the rebuild needs only the request's id."""
        return self.is_told and self.has_ended


@dataclass(frozen=True, slots=True)
class RebuiltPartition:
    """A partition's state from the log; `live` is in order of arrival at the gateway."""

    live: list[
        tuple[LiveRequest, Phase | None]
    ]  # with the phase by which the attempt failed, if it did
    ended_ids: list[tuple[str, int]]  # ids with their deadlines
    untold: list[tuple[LiveRequest, Outcome]]  # ended requests whose usage is not in the log
    early: list[Cancellation]  # without a request in the log
    sessions: list[Session]


class Rebuild:
    """Folds the records of one partition; call `result` after all of them."""

    def __init__(self, partition: int, *, continues: bool) -> None:
        """Create an empty rebuild; with `continues`, new attempts continue their answers."""
        self.partition = partition
        self._continues = continues
        self._traces: dict[str, _Trace] = {}
        self._sessions: dict[SessionKey, Session] = {}

    def add(self, event: PartitionEvent) -> None:
        """Fold one record into the trace of its request."""
        match event:
            case RequestArrived(request):
                trace = self._trace(request.request_id)
                if trace.request is None:  # the first one counts, as in the live state
                    trace.deadline_ms = request.deadline_ms
                    trace.request = None if trace.is_over else request
            case CancellationArrived(cancellation):
                trace = self._trace(cancellation.request_id)
                if not is_outdated(cancellation, taken_up=bool(trace.resumed)):
                    trace.cancels.setdefault(cancellation.tenant, cancellation)
            case ResumptionArrived(resumption):
                place = resumption.gateway_id, resumption.gateway_started_ms
                self._trace(resumption.request_id).resumed.append(place)
            case PhaseArrived(phase):
                trace = self._trace(phase.request_id)
                if not trace.is_over:
                    trace.phases.append(phase)
            case RetrievedArrived(retrieved):
                trace = self._trace(retrieved.request_id)
                if retrieved.probe:
                    trace.probes += () if trace.has_ended else (retrieved,)
                elif trace.retrieved is None and not trace.is_over:
                    trace.retrieved = retrieved
            case ContinuedArrived(continued):
                trace = self._trace(continued.request_id)
                if continued.end is not None:
                    trace.read_ends[continued.attempt] = continued.end
                elif not trace.is_over:
                    trace.continued.setdefault(continued.attempt, continued)
            case DecisionLoaded(decision):
                self._add_decision(decision)
            case OutcomeArrived(outcome):
                trace = self._trace(outcome.request_id)
                if outcome.attempt > trace.outcome_attempt:
                    trace.outcome = outcome
            case UsageLoaded(request_id):
                self._trace(request_id).is_told = True
            case SessionLoaded(session):
                # KV is used once, and the log does not show whether it was used since
                used = session if session.kv is None else replace(session, kv=None)
                self._sessions[session_key(session)] = used
            case _:
                raise AssertionError(f"no record of a partition: {event}")

    def _trace(self, request_id: str) -> _Trace:
        trace = self._traces.get(request_id)
        if trace is None:
            trace = self._traces[request_id] = _Trace()
        return trace

    def _add_decision(self, decision: Decision) -> None:
        trace = self._trace(decision.request_id)
        placing = _Placing(
            decision.attempt,
            decision.mode,
            decision.orchestration,
            (decision.prefill_worker, decision.prefill_epoch),
            (decision.decode_worker, decision.decode_epoch),
        )
        if decision.kind in PLACING and decision.attempt >= trace.placed.attempt:
            trace.placed = placing
        elif decision.kind is DecisionKind.HANDOFF and decision.attempt >= trace.handed.attempt:
            trace.handed = placing
        elif decision.kind is DecisionKind.VOID:
            if decision.attempt >= trace.void_attempt:
                trace.void_attempt, trace.void_reason = decision.attempt, decision.reason
            if is_loss(decision.reason):
                trace.losses.add(decision.attempt)
            elif is_fault(decision.reason):
                trace.faults.add(decision.attempt)
        elif _is_failed_try(decision):
            trace.failed_tries += 1

    def result(self) -> RebuiltPartition:
        """Return the partition's state after all records folded so far."""
        rebuilt = RebuiltPartition([], [], [], [], [])
        for request_id, trace in self._traces.items():
            if trace.has_ended:
                rebuilt.ended_ids.append((request_id, trace.deadline_ms))
                if trace.request is not None and trace.outcome is not None and not trace.is_told:
                    rebuilt.untold.append(
                        (_ended_request(trace.request, trace, self.partition), trace.outcome)
                    )
            elif trace.request is not None:
                live, failed = _live(trace.request, trace, self.partition)
                if _waits_for_word(live, trace, continues=self._continues):
                    live.enter(State.CONTINUING)
                for attempt, end in trace.read_ends.items():
                    live.read_end = end if live.has_given_up(attempt) else live.read_end
                rebuilt.live.append((live, failed))
            else:
                rebuilt.early.extend(trace.cancels.values())
        rebuilt.live.sort(key=lambda pair: (pair[0].queued_ms, pair[0].request_id))
        rebuilt.sessions.extend(sorted(self._sessions.values(), key=lambda s: s.last_used_ms))
        return rebuilt


def _base_request(request: Request, trace: _Trace, partition: int) -> LiveRequest:
    """Return the request with its prompt and the time spent on it, in its first state."""
    live = new_live_request(request, partition)
    live.worker_time.is_told = trace.is_told
    if request.retrieval is not None and trace.retrieved is not None:
        live.take(with_context(request, trace.retrieved))
    for phase in trace.phases:
        note_work(live, phase)
    return live


def _ended_request(request: Request, trace: _Trace, partition: int) -> LiveRequest:
    """Return the ended request with the workers of its last attempt."""
    live, placed = _base_request(request, trace, partition), trace.placed
    handed = trace.handed if trace.handed.attempt == placed.attempt else placed
    live.attempt = Attempt(number=placed.attempt, prefill=placed.prefill, decode=handed.decode)
    return live


def _live(request: Request, trace: _Trace, partition: int) -> tuple[LiveRequest, Phase | None]:
    """Return the request as its latest attempt left it, and the phase that failed the attempt, if
    any. The request is not yet in any index."""
    live = _base_request(request, trace, partition)
    placed = trace.placed
    if request.retrieval is not None and trace.retrieved is None and not placed.attempt:
        live.enter(State.RETRIEVING)
    for probe in trace.probes:
        live.passages.probed = with_probe(live.passages.probed, request, probe)
    cancels = [cancel.reason for cancel in trace.cancels.values() if may_cancel(cancel, request)]
    live.cancel = next(iter(cancels), None)
    live.readers.resumed = bool(trace.resumed)
    for gateway in trace.resumed:
        live.readers.gateways = with_reader(live.readers.gateways, gateway)
    live.failures = VoidAttempts(len(trace.faults), len(trace.losses), trace.failed_tries)
    if not placed.attempt:
        return live, None
    at = live.attempt = Attempt(
        number=placed.attempt,
        mode=placed.mode,
        orchestration=placed.orchestration,
        prefill=placed.prefill,
        decode=placed.decode,
    )
    is_void = trace.void_attempt >= placed.attempt
    behind = trace.continued.get(placed.attempt - (not is_void))
    live.set_prior_answer(*prior_answer(live.request, behind))
    if is_void:
        errors = [phase.error for phase in trace.phases if phase.attempt == placed.attempt]
        live.failures.error = next(filter(None, errors), None)
        live.failures.reason = trace.void_reason
        if trace.handed.attempt == placed.attempt:
            at.decode = trace.handed.decode
        return live, None
    at.sent_tokens, at.sent_chars = live.prior
    live.enter(BEGINS[placed.orchestration])
    return live, _replay(live, trace)


def _waits_for_word(live: LiveRequest, trace: _Trace, *, continues: bool) -> bool:
    """Return whether its attempt is void and no record yet says how much its readers have."""
    is_void = 0 < live.attempt.number <= trace.void_attempt
    is_open = is_void and live.attempt.number not in trace.continued
    return is_open and awaits_progress(live.request, continues=continues)


def _replay(live: LiveRequest, trace: _Trace) -> Phase | None:
    """Take the attempt through its phases in order, as the live path does; return the phase that
    failed it, if any."""
    handed = trace.handed if trace.handed.attempt == live.attempt.number else None
    for phase in trace.phases:
        if phase.attempt != live.attempt.number:
            continue
        note(live, phase)
        following = step(live, (phase.worker_id, phase.worker_epoch), phase.kind, phase.kv)
        if following is State.QUEUED:
            return phase
        if following is not None:
            live.enter(following)
        if following is State.HANDING_OVER:
            _hand_over(live, handed)
    if live.state is State.PREFILLING:  # its `prefill_done` was not read
        _hand_over(live, handed)
    return None


def _hand_over(live: LiveRequest, handed: _Placing | None) -> None:
    if handed is not None:
        live.enter(State.DECODING)
        live.attempt.decode = handed.decode
        live.attempt.mode, live.attempt.orchestration = handed.mode, handed.orchestration
        if live.attempt.mode is not Mode.REMOTE:
            live.attempt.kv = None


def _is_failed_try(decision: Decision) -> bool:
    """Return whether a router wrote this decision because it raised over the request."""
    return decision.kind is DecisionKind.FAIL and decision.reason is Reason.ROUTER_RESTARTED
