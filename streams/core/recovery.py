"""Rebuilds one partition's live requests from the records that the log holds of it.

Theory of operation. The records of a partition lie on several topics, between which no order is
known, so the fold does not depend on it: per request it keeps the latest attempt that was placed,
the hand-over and the phases of that attempt, a cancellation, and the outcome. An outcome counts
unless a later attempt was placed, exactly as in the live state, and so live state equals a rebuild.
To keep memory low, feed outcomes first: what has ended is then not kept at all.

Pure, and knows nothing of workers: whether those that hold a request still live is
`streams/core/router.py`'s question.
"""

from dataclasses import dataclass, field

from schemas.records import (
    CancelReason,
    Decision,
    DecisionKind,
    Mode,
    Phase,
    PhaseKind,
    Request,
    Session,
)
from streams.core.events import (
    CancellationArrived,
    OutcomeArrived,
    PartitionEvent,
    PhaseArrived,
    Placed,
    RequestArrived,
    SessionLoaded,
)
from streams.core.fleet import Life
from streams.core.requests import NOBODY, Live, State

_PLACING = (DecisionKind.PLACE, DecisionKind.REPLACE)


@dataclass(frozen=True, slots=True)
class _Placing:
    """What a rebuild needs of a decision."""

    attempt: int
    mode: Mode
    prefill: Life
    decode: Life


_UNPLACED = _Placing(0, Mode.NONE, NOBODY, NOBODY)


@dataclass(slots=True)
class _Trace:
    """All that is known of one request."""

    request: Request | None = None
    deadline_ms: int = 0
    placed: _Placing = _UNPLACED
    handed: _Placing = _UNPLACED
    phases: list[Phase] = field(default_factory=list)
    cancel: CancelReason | None = None
    outcome_attempt: int = -1

    @property
    def has_ended(self) -> bool:
        return self.outcome_attempt >= self.placed.attempt


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A partition as the log tells it; lists are in order of arrival at the gateway."""

    live: list[tuple[Live, Phase | None]]  # with the phase by which the attempt failed, if it did
    ended: list[tuple[str, int]]  # ids with their deadlines
    early: list[tuple[str, CancelReason]]  # cancelled, but never seen
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
                self._trace(cancellation.request_id).cancel = cancellation.reason
            case PhaseArrived(phase):
                trace = self._trace(phase.request_id)
                if phase.attempt > trace.outcome_attempt:
                    trace.phases.append(phase)
            case Placed(decision):
                self._decided(decision)
            case OutcomeArrived(outcome):
                trace = self._trace(outcome.request_id)
                trace.outcome_attempt = max(trace.outcome_attempt, outcome.attempt)
            case SessionLoaded(session):
                self._sessions[session.session_id] = session
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
            (decision.prefill_worker, decision.prefill_epoch),
            (decision.decode_worker, decision.decode_epoch),
        )
        if decision.kind in _PLACING and decision.attempt >= trace.placed.attempt:
            trace.placed = placing
        elif decision.kind is DecisionKind.HANDOFF and decision.attempt >= trace.handed.attempt:
            trace.handed = placing

    def result(self) -> Rebuilt:
        """The partition's state as of all records folded so far."""
        rebuilt = Rebuilt([], [], [], [])
        for request_id, trace in self._traces.items():
            if trace.has_ended:
                rebuilt.ended.append((request_id, trace.deadline_ms))
            elif trace.request is not None:
                rebuilt.live.append(_live(trace.request, trace, self.partition))
            elif trace.cancel is not None:
                rebuilt.early.append((request_id, trace.cancel))
        rebuilt.live.sort(key=lambda pair: (pair[0].queued_ms, pair[0].request_id))
        rebuilt.sessions.extend(sorted(self._sessions.values(), key=lambda s: s.last_used_ms))
        return rebuilt


def arrived(request: Request, partition: int) -> Live:
    """A request as it arrives; its wait counts from the gateway, over restarts."""
    return Live(
        request=request,
        partition=partition,
        prompt_tokens=len(request.prompt_tokens) // 4,
        queued_ms=request.arrived_ms,
    )


def prefilled(live: Live, phase: Phase) -> None:
    """What a finished prefill tells about its request."""
    live.kv = phase.kv
    live.sent_tokens, live.sent_chars = phase.sent_tokens, phase.sent_chars
    live.cached_tokens, live.first_token_ms = phase.cached_tokens, phase.ended_ms


def _live(request: Request, trace: _Trace, partition: int) -> tuple[Live, Phase | None]:
    """The request as its latest attempt left it; `life` is set, but not yet in any index."""
    live = arrived(request, partition)
    placed = trace.placed
    live.cancel, live.attempt, live.mode = trace.cancel, placed.attempt, placed.mode
    live.prefill, live.decode = placed.prefill, placed.decode
    if not placed.attempt:
        return live, None
    if placed.mode is Mode.REMOTE:
        live.state, live.life = State.PREFILLING, live.prefill
    else:
        live.state, live.life = State.DECODING, live.decode
    return live, _replay(live, trace)


def _replay(live: Live, trace: _Trace) -> Phase | None:
    """Take the attempt through its phases in order, as the live state was; what failed it, if
    something did."""
    handed = trace.handed if trace.handed.attempt == live.attempt else None
    for phase in trace.phases:
        if phase.attempt != live.attempt or (phase.worker_id, phase.worker_epoch) != live.life:
            continue
        if phase.kind is PhaseKind.PREFILL_DONE and live.state is State.PREFILLING:
            prefilled(live, phase)
            live.state = State.HANDING_OVER
            _hand_over(live, handed)
        elif live.state is State.HANDING_OVER:
            continue
        elif phase.kind is PhaseKind.KV_RECEIVED:
            live.kv_received = True
        elif phase.kind in (PhaseKind.REFUSED, PhaseKind.FAILED):
            return phase
    if live.state is State.PREFILLING:  # its phase is older than what was read
        _hand_over(live, handed)
    return None


def _hand_over(live: Live, handed: _Placing | None) -> None:
    if handed is not None:
        live.state, live.life, live.kv = State.DECODING, handed.decode, None
        live.mode, live.decode = handed.mode, handed.decode
