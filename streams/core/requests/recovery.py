"""Rebuilds one partition's live requests from the records that the log holds of it.

Theory of operation. The records of a partition lie on several topics, between which no order is
known, so the fold does not depend on it: per request it keeps the latest attempt that was placed,
whether it was given up, its hand-over and phases, a cancellation, and the outcome. An attempt is
taken through its phases by the same `note` and `step` that the live state uses; one that was given
up waits to be placed again, whatever its workers said. An outcome counts unless a later attempt was
placed, exactly as in the live state, and so live state equals a rebuild.
To keep memory low, feed outcomes first: what has ended is then not kept at all.

Pure, and knows nothing of workers: whether those that hold a request still live is
`streams/core/router.py`'s question.
"""

from dataclasses import dataclass, field, replace

from schemas.records import (
    Cancellation,
    Decision,
    DecisionKind,
    Mode,
    Orchestration,
    Phase,
    Reason,
    Request,
    Retrieved,
    Session,
)
from streams.core.events import (
    CancellationArrived,
    OutcomeArrived,
    PartitionEvent,
    PhaseArrived,
    Placed,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
    SessionLoaded,
)
from streams.core.fleet.workers import Gateway, Life
from streams.core.requests.context import with_context
from streams.core.requests.live import (
    NOBODY,
    LiveRequest,
    arrived,
    may_cancel,
    note,
    resumed_at,
    step,
)
from streams.core.requests.probed import with_probe
from streams.core.states import BEGINS, State

_PLACING = (DecisionKind.PLACE, DecisionKind.REPLACE)


@dataclass(frozen=True, slots=True)
class _Placing:
    """What a rebuild needs of a decision."""

    attempt: int
    mode: Mode
    orchestration: Orchestration
    prefill: Life
    decode: Life


_UNPLACED = _Placing(0, Mode.NONE, Orchestration.NONE, NOBODY, NOBODY)


@dataclass(slots=True)
class _Trace:
    """All that is known of one request."""

    request: Request | None = None
    deadline_ms: int = 0
    placed: _Placing = _UNPLACED
    handed: _Placing = _UNPLACED
    void_attempt: int = 0  # the latest that was given up
    faults: set[int] = field(default_factory=set)  # those of them that workers failed
    losses: set[int] = field(default_factory=set)  # those that were lost with their workers
    retrieved: Retrieved | None = None  # the first in the log, for the prompt
    probes: list[Retrieved] = field(default_factory=list)  # found during the answer
    phases: list[Phase] = field(default_factory=list)
    cancels: dict[str, Cancellation] = field(default_factory=dict)  # the first of each tenant
    resumed: list[Gateway] = field(default_factory=list)
    outcome_attempt: int = -1
    failed_tries: int = 0

    @property
    def has_ended(self) -> bool:
        return self.outcome_attempt >= self.placed.attempt


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A partition as the log tells it; lists are in order of arrival at the gateway."""

    live: list[
        tuple[LiveRequest, Phase | None]
    ]  # with the phase by which the attempt failed, if it did
    ended: list[tuple[str, int]]  # ids with their deadlines
    early: list[Cancellation]  # of requests that were never seen
    sessions: list[Session]


class Rebuild:
    """Folds records of one partition; `result` once all are in."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self._traces: dict[str, _Trace] = {}
        self._sessions: dict[str, Session] = {}

    def add(self, event: PartitionEvent) -> None:
        """Fold one record."""
        match event:
            case RequestArrived(request):
                trace = self._trace(request.request_id)
                trace.deadline_ms = request.deadline_ms
                trace.request = None if trace.has_ended else request
            case CancellationArrived(cancellation):
                cancels = self._trace(cancellation.request_id).cancels
                cancels.setdefault(cancellation.tenant, cancellation)
            case ResumptionArrived(resumption):
                place = resumption.gateway_id, resumption.gateway_started_ms
                self._trace(resumption.request_id).resumed.append(place)
            case PhaseArrived(phase):
                trace = self._trace(phase.request_id)
                if phase.attempt > trace.outcome_attempt:
                    trace.phases.append(phase)
            case RetrievedArrived(retrieved):
                trace = self._trace(retrieved.request_id)
                if retrieved.probe and not trace.has_ended:
                    trace.probes.append(retrieved)
                elif trace.retrieved is None and not trace.has_ended:
                    trace.retrieved = retrieved
            case Placed(decision):
                self._decided(decision)
            case OutcomeArrived(outcome):
                trace = self._trace(outcome.request_id)
                trace.outcome_attempt = max(trace.outcome_attempt, outcome.attempt)
            case SessionLoaded(session):
                # whether its KV was used since is not known, and KV is used once
                self._sessions[session.session_id] = replace(session, kv=None)
            case _:
                raise AssertionError(f"no record of a partition: {event}")

    def _trace(self, request_id: str) -> _Trace:
        trace = self._traces.get(request_id)
        if trace is None:
            trace = self._traces[request_id] = _Trace()
        return trace

    def _decided(self, decision: Decision) -> None:
        trace = self._trace(decision.request_id)
        placing = _Placing(
            decision.attempt,
            decision.mode,
            decision.orchestration,
            (decision.prefill_worker, decision.prefill_epoch),
            (decision.decode_worker, decision.decode_epoch),
        )
        if decision.kind in _PLACING and decision.attempt >= trace.placed.attempt:
            trace.placed = placing
        elif decision.kind is DecisionKind.HANDOFF and decision.attempt >= trace.handed.attempt:
            trace.handed = placing
        elif decision.kind is DecisionKind.VOID:
            trace.void_attempt = max(trace.void_attempt, decision.attempt)
            if decision.reason is Reason.WORKER_LOST:
                trace.losses.add(decision.attempt)
            elif decision.reason is not Reason.ROUTER_RESTARTED:
                trace.faults.add(decision.attempt)
        elif _is_failed_try(decision):
            trace.failed_tries += 1

    def result(self) -> Rebuilt:
        """The partition's state as of all records folded so far."""
        rebuilt = Rebuilt([], [], [], [])
        for request_id, trace in self._traces.items():
            if trace.has_ended:
                rebuilt.ended.append((request_id, trace.deadline_ms))
            elif trace.request is not None:
                rebuilt.live.append(_live(trace.request, trace, self.partition))
            else:
                rebuilt.early.extend(trace.cancels.values())
        rebuilt.live.sort(key=lambda pair: (pair[0].queued_ms, pair[0].request_id))
        rebuilt.sessions.extend(sorted(self._sessions.values(), key=lambda s: s.last_used_ms))
        return rebuilt


def _live(request: Request, trace: _Trace, partition: int) -> tuple[LiveRequest, Phase | None]:
    """The request as its latest attempt left it, not yet in any index."""
    live = arrived(request, partition)
    placed = trace.placed
    if request.retrieval is not None and trace.retrieved is not None:
        live.take(with_context(request, trace.retrieved))
    elif request.retrieval is not None and not placed.attempt:
        live.enter(State.RETRIEVING)
    for probe in trace.probes:
        live.probed = with_probe(live.probed, request, probe)
    cancels = [each.reason for each in trace.cancels.values() if may_cancel(each, request)]
    live.cancel = next(iter(cancels), None)
    for gateway in trace.resumed:
        live.readers = resumed_at(live.readers, gateway)
    live.attempt, live.failed_tries = placed.attempt, trace.failed_tries
    live.faults, live.losses = len(trace.faults), len(trace.losses)
    if not placed.attempt:
        return live, None
    live.mode, live.orchestration = placed.mode, placed.orchestration
    live.prefill, live.decode = placed.prefill, placed.decode
    if trace.void_attempt >= placed.attempt:
        errors = [phase.error for phase in trace.phases if phase.attempt == placed.attempt]
        live.error = next(filter(None, errors), None)
        return live, None
    live.enter(BEGINS[placed.orchestration])
    return live, _replay(live, trace)


def _replay(live: LiveRequest, trace: _Trace) -> Phase | None:
    """Take the attempt through its phases in order, as the live state was; what failed it, if
    something did."""
    handed = trace.handed if trace.handed.attempt == live.attempt else None
    for phase in trace.phases:
        if phase.attempt != live.attempt:
            continue
        note(live, phase)
        following = step(live, (phase.worker_id, phase.worker_epoch), phase.kind, phase.kv)
        if following is State.QUEUED:
            return phase
        if following is not None:
            live.enter(following)
        if following is State.HANDING_OVER:
            _hand_over(live, handed)
    if live.state is State.PREFILLING:  # its phase is older than what was read
        _hand_over(live, handed)
    return None


def _hand_over(live: LiveRequest, handed: _Placing | None) -> None:
    if handed is not None:
        live.enter(State.DECODING)
        live.decode = handed.decode
        live.mode, live.orchestration = handed.mode, handed.orchestration
        if live.mode is not Mode.REMOTE:
            live.kv = None


def _is_failed_try(decision: Decision) -> bool:
    """Whether this was written by a router that ended over the request."""
    return decision.kind is DecisionKind.FAIL and decision.reason is Reason.ROUTER_RESTARTED
