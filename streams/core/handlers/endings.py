"""Ends attempts and requests: queues a request again, or ends it with an outcome.

A router ends the requests that no worker ends. Every end calls `close`, which frees the request's
credits, keeps its id and reports its usage. Called by the other handlers and by
`streams/core/router.py`.
"""

from collections.abc import Callable
from typing import Final

from schemas.errors import Cancelled, DeadlineExceeded, QueueFull, WorkerLost
from schemas.records import (
    CancelReason,
    Candidate,
    DecisionKind,
    Outcome,
    OutcomeKind,
    Reason,
    Session,
    StreamEnd,
    WireError,
)
from streams.core.effects import Decide, DropSession, End, RecordUsage, SaveSession
from streams.core.fleet.workers import DECODERS
from streams.core.handlers import decisions
from streams.core.handlers.orders import Orders
from streams.core.placement.answer import Placement
from streams.core.placement.estimates import ASSUMED_PREFILL_TOKENS_PER_S, ASSUMED_STEP_MS
from streams.core.requests.admission import CLASSES
from streams.core.requests.live import LiveRequest, is_fault, is_loss
from streams.core.requests.sessions import session_key
from streams.core.requests.usage import usage_of
from streams.core.states import State
from streams.core.tables import RouterTables

ATTEMPTS_MAX: Final = 3  # failures on workers: the request may be the reason
# Losses and refusals of workers, which say little about the request.
LOSSES_MAX: Final = 12
# How long after its deadline a worker may still end a request: its report may be on the way.
DEADLINE_GRACE_MS: Final = 5_000
_ProgressRequest = Callable[[LiveRequest, int], bool]
_DECISION_OF = {
    OutcomeKind.SHED: DecisionKind.SHED,
    OutcomeKind.EXPIRED: DecisionKind.EXPIRE,
    OutcomeKind.CANCELLED: DecisionKind.CANCEL,
    OutcomeKind.FAILED: DecisionKind.FAIL,
}


class Endings:
    """Ends attempts and requests, over the router's tables."""

    def __init__(
        self, tables: RouterTables, orders: Orders, request_progress: _ProgressRequest
    ) -> None:
        """Create the handler; `request_progress` asks an answer's readers how much they have, if
        it can be continued, and returns whether it asked."""
        self._tables = tables
        self._orders = orders
        self._request_progress = request_progress

    def enqueue(self, live: LiveRequest, now_ms: int) -> None:
        """Put a request into the queue; one that was placed before goes into the best class."""
        tables, request = self._tables, live.request
        tables.requests.move(live, State.QUEUED)
        tables.demand.queued.add(now_ms, prompt_tokens=live.prompt_tokens)
        prefill_ms = live.prompt_tokens * 1000 // ASSUMED_PREFILL_TOKENS_PER_S
        decode_ms = int(request.sampling.max_tokens * ASSUMED_STEP_MS)
        shed = tables.admission.arrive(
            live.request_id,
            tenant=request.tenant,
            level=0 if live.attempt else CLASSES[request.priority],
            tokens=live.prompt_tokens,
            work_ms=prefill_ms + decode_ms,
            deadline_ms=request.deadline_ms,
            since_ms=live.queued_ms,
            now_ms=now_ms,
        )
        for request_id in shed:
            self.end_shed(tables.requests.by_id[request_id], now_ms)

    def expire_queue(self, now_ms: int) -> None:
        """End the requests that are still queued at their deadlines."""
        for request_id in self._tables.admission.expire(now_ms):
            self.end_expired(self._tables.requests.by_id[request_id], now_ms)

    def requeue(
        self, live: LiveRequest, reason: Reason, error: WireError | None, now_ms: int
    ) -> None:
        """Void the attempt, and place the request again, or end it if that is useless."""
        live.error = error or live.error
        live.losses += is_loss(reason)
        live.faults += is_fault(reason)
        if live.cancel is not None:
            self.end_cancelled(live, now_ms)
        elif live.faults >= ATTEMPTS_MAX or live.losses >= LOSSES_MAX:
            last = live.error or WorkerLost("its worker fell silent").to_wire()
            tries = live.faults + live.losses
            message = f"{live.request_id}: gave up after {tries} attempts: {last.message}"
            error = WireError(code=last.code, message=message, retriable=last.retriable)
            self.end_failed(live, Reason.ATTEMPTS_EXHAUSTED, error, now_ms)
        else:
            self.decide(live, DecisionKind.VOID, reason, now_ms)  # before workers drop it
            self._orders.void(live, now_ms)
            live.replaced_for, live.kv = reason, None
            self.retry(live, now_ms)

    def retry(self, live: LiveRequest, now_ms: int) -> None:
        """Queue the request again, at once or after its readers have answered."""
        if not self._request_progress(live, now_ms):
            self.enqueue(live, now_ms)

    def stop(self, live: LiveRequest, now_ms: int) -> None:
        """Have the worker that will end a cancelled request do so now."""
        assert live.cancel is not None
        self.decide(live, DecisionKind.CANCEL, Reason(live.cancel.value), now_ms)
        self._orders.stop(live, now_ms)
        self._tables.requests.move(live, State.CANCELLING)

    def end_shed(self, live: LiveRequest, now_ms: int) -> None:
        """End a request because the queue is full."""
        message = f"{live.request_id}: the admission queue is full; try again later"
        self._end(live, OutcomeKind.SHED, Reason.QUEUE_FULL, QueueFull(message).to_wire(), now_ms)

    def end_expired(self, live: LiveRequest, now_ms: int) -> None:
        """End a request whose deadline has passed."""
        serving = any(self._tables.fleet.has_living(role, now_ms) for role in DECODERS)
        reason = Reason.DEADLINE_PASSED if serving else Reason.NO_WORKER
        why = "was not answered in time" if serving else "no worker was there to answer it"
        message = f"{live.request_id}: {why}; it waited {max(0, now_ms - live.queued_ms)} ms"
        self._end(live, OutcomeKind.EXPIRED, reason, DeadlineExceeded(message).to_wire(), now_ms)

    def end_cancelled(self, live: LiveRequest, now_ms: int) -> None:
        """End a cancelled request that no worker ends."""
        reason = Reason((live.cancel or CancelReason.CLIENT_REQUEST).value)
        error = Cancelled(f"{live.request_id}: cancelled: {reason.value}").to_wire()
        self._end(live, OutcomeKind.CANCELLED, reason, error, now_ms)

    def end_failed(self, live: LiveRequest, reason: Reason, error: WireError, now_ms: int) -> None:
        """End a request that cannot be answered."""
        self._end(live, OutcomeKind.FAILED, reason, error, now_ms)

    def end_as_read(self, live: LiveRequest, end: StreamEnd, now_ms: int) -> None:
        """End a request whose readers have the end of a void attempt: that end counts."""
        error = end.error
        outcome = decisions.outcome(self._tables.router_id, live, end.kind, error, now_ms)
        if end.kind is OutcomeKind.COMPLETED:
            outcome = decisions.as_read(outcome, end)
        self._finish(live, outcome, now_ms)

    def _end(
        self, live: LiveRequest, kind: OutcomeKind, reason: Reason, error: WireError, now_ms: int
    ) -> None:
        self.decide(live, _DECISION_OF[kind], reason, now_ms)
        outcome = decisions.outcome(self._tables.router_id, live, kind, error, now_ms)
        self._finish(live, outcome, now_ms)

    def _finish(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        self._orders.void(live, now_ms)
        end = End(outcome, live.partition, live.request.gateway_partition)
        self._tables.effects.append(end)
        self.close(live, outcome, now_ms)

    def end_by_worker(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        """Close a request that a worker ended; void what a pair's prefill worker still does."""
        if live.is_paired:
            self._orders.refund(live, live.decode)
            self._orders.void(live, now_ms)
        self.close(live, outcome, now_ms)

    def close(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        """Free the credits of an ended request, keep its id, and report its usage."""
        tables = self._tables
        tables.admission.remove(live.request_id)
        self._orders.refund(live)
        tables.requests.drop(live)
        tables.admission.count_answer(live.request.tenant, outcome.completion_tokens)
        if outcome.kind is OutcomeKind.COMPLETED:
            tables.demand.answered.add(now_ms, answer_tokens=outcome.completion_tokens)
        until_ms = max(live.request.deadline_ms, now_ms) + DEADLINE_GRACE_MS
        tables.ended_ids.add(live.request_id, until_ms, live.partition)
        self.tell_usage(live, outcome)

    def remember_session(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        """Store which worker has the KV of a completed answer, for the session's next turn."""
        if not outcome.decode_worker or outcome.decode_worker != live.decode[0]:
            return
        last_session = self._tables.sessions.get(session_key(live.request), now_ms)
        session = Session(
            session_id=outcome.session_id,
            decode_worker=outcome.decode_worker,
            worker_epoch=live.decode[1],
            context_tokens=outcome.prompt_tokens + outcome.completion_tokens,
            turns=1 + (0 if last_session is None else last_session.turns),
            last_used_ms=now_ms,
            kv=outcome.kv,
            tenant=live.request.tenant,
        )
        self._tables.sessions.put(session, live.partition)
        self._tables.effects.append(SaveSession(session, live.partition))
        self.evict_sessions(now_ms)

    def evict_sessions(self, now_ms: int) -> None:
        """Drop sessions that are too old, and the least recently used ones beyond the limit."""
        for key, partition in self._tables.sessions.evict(now_ms):
            self._tables.effects.append(DropSession(*key, partition))

    def tell_usage(self, live: LiveRequest, outcome: Outcome) -> None:
        """Have the usage of an ended request written, unless it is in the log."""
        if not live.is_told:
            self._tables.effects.append(RecordUsage(usage_of(live, outcome), live.partition))

    def decide(
        self,
        live: LiveRequest,
        kind: DecisionKind,
        reason: Reason,
        now_ms: int,
        *,
        session: Session | None = None,
        placement: Placement | None = None,
        looked_at: tuple[Candidate, ...] = (),
    ) -> None:
        """Write a decision about a request."""
        tables = self._tables
        policy = live.case.policy if live.case is not None else ""
        decision = decisions.decision(
            tables.router_id,
            live,
            kind,
            reason,
            placement.policy if placement is not None else policy or tables.settings.policy,
            now_ms,
            queue_length=len(tables.admission),
            session=session,
            placement=placement,
            looked_at=looked_at,
        )
        tables.effects.append(Decide(decision, live.partition))
