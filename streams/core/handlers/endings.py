"""Ends attempts and requests: places a request again, or ends it with an outcome.

A router ends the requests that no worker ends. Every end calls `close`, which frees the request's
credits, keeps its id and reports its usage.

Before the next attempt, the router finds how much of the answer its readers have. It writes a mark
on `tokens` that the attempt is void. The answer's readers deliver nothing of the attempt behind the
mark, and write what they had before it: a `Continued`. So all readers of the log agree where the
answer stops, and the next attempt continues there. A reader that still has the answer's end,
because it is in the log before the next attempt, writes that: the answer is over. The first
`Continued` that the router reads counts. If no reader writes one in time, the router has an empty
one written, and the answer restarts.
"""

from typing import Final

from schemas.errors import Cancelled, DeadlineExceeded, PriorRefused, QueueFull, WorkerLost
from schemas.records import (
    CancelReason,
    Continued,
    DecisionKind,
    Outcome,
    OutcomeKind,
    Reason,
    Session,
    StreamEnd,
    StreamVoid,
    Usage,
    WireError,
)
from schemas.rules.continuing import awaits_progress, prior_answer
from streams.core.effects import (
    DropSession,
    End,
    RecordUsage,
    RequestProgress,
    RestartAnswer,
    SaveSession,
)
from streams.core.handlers.orders import Orders, as_read, outcome_of
from streams.core.requests.live import LiveRequest, is_fault, is_loss, model_name, session_key
from streams.core.states import State
from streams.core.tables import RouterTables

ATTEMPTS_MAX: Final = 3  # failures on workers: the request may be the reason
# Losses and refusals of workers, which say little about the request.
LOSSES_MAX: Final = 12
# How long after its deadline a worker may still end a request: its report may be on the way.
DEADLINE_GRACE_MS: Final = 5_000
# For the progress of an answer's readers, many times the way through the log.
CONTINUE_WAIT_MS: Final = 1_000
UNNUMBERED = -1  # of usage, which its writer numbers
_DECISION_OF = {
    OutcomeKind.SHED: DecisionKind.SHED,
    OutcomeKind.EXPIRED: DecisionKind.EXPIRE,
    OutcomeKind.CANCELLED: DecisionKind.CANCEL,
    OutcomeKind.FAILED: DecisionKind.FAIL,
}


class Endings:
    """Ends attempts and requests, over the router's tables."""

    def __init__(self, tables: RouterTables, orders: Orders) -> None:
        self._tables = tables
        self._orders = orders

    def requeue(
        self, live: LiveRequest, reason: Reason, error: WireError | None, now_ms: int
    ) -> None:
        """Void the attempt, and place the request again, or end it if that is useless."""
        live.failures.error = error or live.failures.error
        live.failures.losses += is_loss(reason)
        live.failures.faults += is_fault(reason)
        if live.cancel is not None:
            self.end_cancelled(live, now_ms)
        elif live.failures.faults >= ATTEMPTS_MAX or live.failures.losses >= LOSSES_MAX:
            last = live.failures.error or WorkerLost("its worker fell silent").to_wire()
            tries = live.failures.faults + live.failures.losses
            message = f"{live.request_id}: gave up after {tries} attempts: {last.message}"
            error = WireError(code=last.code, message=message, retriable=last.retriable)
            self.end_failed(live, Reason.ATTEMPTS_EXHAUSTED, error, now_ms)
        else:
            self._orders.decide(live, DecisionKind.VOID, reason, now_ms)  # before workers drop it
            self._orders.void(live, now_ms)
            live.failures.reason, live.attempt.kv = reason, None
            refuses = error is not None and error.code == PriorRefused.code
            self.retry(live, now_ms, restarts=refuses and live.prior.tokens > 0)

    def retry(self, live: LiveRequest, now_ms: int, *, restarts: bool = False) -> None:
        """Queue the request again, at once or after its readers have answered.

        With `restarts`, no reader is asked, and the answer restarts: the form of the answer refused
        the tokens that they would report again. To fail the request would lose calls that are not
        streamed, and that nobody has read.
        """
        if not self._request_progress(live, now_ms, restarts=restarts):
            self._tables.enqueue(live, now_ms)

    def _request_progress(self, live: LiveRequest, now_ms: int, *, restarts: bool) -> bool:
        """Ask the readers how much of the answer they have; return False if that is not needed."""
        tables = self._tables
        live.set_prior_answer(b"", 0)
        waits = awaits_progress(live.request, continues=tables.settings.continues)
        self.mark(live, live.attempt.number, asks=waits and not restarts)
        if not waits:
            return False
        tables.requests.move(live, State.CONTINUING)
        if restarts:
            self._restart(live, now_ms)
        live.readers.progress_deadline_ms = now_ms + CONTINUE_WAIT_MS
        tables.requests.watch(live, live.readers.progress_deadline_ms)
        return True

    def mark(self, live: LiveRequest, attempt: int, *, asks: bool = False) -> None:
        """Send the readers the notice that the attempt is void.

        A reader writes the attempt's end if it has it, or gets it before the next attempt begins.
        """
        void = StreamVoid(request_id=live.request_id, attempt=attempt, asks=asks)
        self._tables.effects.append(RequestProgress(void, live.request.gateway_partition))

    def restart_late(self, live: LiveRequest, now_ms: int) -> None:
        """Write that no reader has answered in time, so that the answer restarts."""
        if now_ms >= live.readers.progress_deadline_ms:
            self._restart(live, now_ms)

    def _restart(self, live: LiveRequest, now_ms: int) -> None:
        nothing = Continued(
            request_id=live.request_id,
            session_id=live.request.session_id,
            attempt=live.attempt.number,
            written_by=self._tables.router_id,
            at_ms=now_ms,
        )
        self._tables.effects.append(RestartAnswer(nothing, live.partition))

    def apply_continued(self, live: LiveRequest, continued: Continued) -> None:
        """End the request's prompt with the answer's tokens that its readers have."""
        live.set_prior_answer(*prior_answer(live.request, continued))

    def stop(self, live: LiveRequest, now_ms: int) -> None:
        """Have the worker that will end a cancelled request do so now."""
        assert live.cancel is not None
        self._orders.decide(live, DecisionKind.CANCEL, Reason(live.cancel.value), now_ms)
        self._orders.stop(live, now_ms)
        self._tables.requests.move(live, State.CANCELLING)

    def end_shed(self, live: LiveRequest, now_ms: int) -> None:
        """End a request because the queue is full."""
        message = f"{live.request_id}: the admission queue is full; try again later"
        self._end(live, OutcomeKind.SHED, Reason.QUEUE_FULL, QueueFull(message).to_wire(), now_ms)

    def end_expired(self, live: LiveRequest, now_ms: int) -> None:
        """End a request whose deadline has passed."""
        pools = self._tables.fleet.of(live.request.model)
        serving = pools.can_end(now_ms, live.request.adapter)
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
        outcome = outcome_of(self._tables.router_id, live, end.kind, error, now_ms)
        if end.kind is OutcomeKind.COMPLETED:
            outcome = as_read(outcome, end)
        self._finish(live, outcome, now_ms)

    def _end(
        self, live: LiveRequest, kind: OutcomeKind, reason: Reason, error: WireError, now_ms: int
    ) -> None:
        self._orders.decide(live, _DECISION_OF[kind], reason, now_ms)
        outcome = outcome_of(self._tables.router_id, live, kind, error, now_ms)
        self._finish(live, outcome, now_ms)

    def _finish(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        self._orders.void(live, now_ms)
        end = End(outcome, live.partition, live.request.gateway_partition)
        self._tables.effects.append(end)
        self.close(live, outcome, now_ms)

    def end_by_worker(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        """Close a request that a worker ended; void what a pair's prefill worker still does."""
        if live.is_paired:
            self._orders.refund(live, live.attempt.decode)
            self._orders.void(live, now_ms)
        self.close(live, outcome, now_ms)

    def close(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        """Free the credits of an ended request, keep its id, and report its usage."""
        tables = self._tables
        queue = tables.queues.of(live.request.model)
        queue.admission.remove(live.request_id)
        self._orders.refund(live)
        tables.requests.drop(live)
        queue.admission.count_answer(live.request.tenant, outcome.completion_tokens)
        if outcome.kind is OutcomeKind.COMPLETED:
            queue.demand.answered.add(now_ms, answer_tokens=outcome.completion_tokens)
        until_ms = max(live.request.deadline_ms, now_ms) + DEADLINE_GRACE_MS
        tables.ended_ids.add(live.request_id, until_ms, live.partition)
        self.tell_usage(live, outcome)

    def remember_session(self, live: LiveRequest, outcome: Outcome, now_ms: int) -> None:
        """Store which worker has the KV of a completed answer, for the session's next turn."""
        if not outcome.decode_worker or outcome.decode_worker != live.attempt.decode[0]:
            return
        last_session = self._tables.sessions.get(session_key(live.request), now_ms)
        session = Session(
            session_id=outcome.session_id,
            decode_worker=outcome.decode_worker,
            worker_epoch=live.attempt.decode[1],
            context_tokens=outcome.prompt_tokens + outcome.completion_tokens,
            turns=1 + (0 if last_session is None else last_session.turns),
            last_used_ms=now_ms,
            kv=outcome.kv,
            tenant=live.request.tenant,
            model=model_name(live.request),
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
        if not live.worker_time.is_told:
            self._tables.effects.append(RecordUsage(usage_of(live, outcome), live.partition))


def usage_of(live: LiveRequest, outcome: Outcome) -> Usage:
    """Return the usage of a request that ended with this outcome: one for each, however it ended.

    The counts are those that its client gets: of the outcome that counts, and of the retrieval for
    the prompt. The time is what workers reported: for each step that they handed over or failed,
    also of void attempts, and for the end. The time of a lost worker is unknown.
    """
    request = live.request
    return Usage(
        number=UNNUMBERED,
        request_id=request.request_id,
        parent_id=request.parent_id,
        choice=request.choice,
        session_id=request.session_id,
        tenant=request.tenant,
        priority=request.priority,
        endpoint=request.endpoint,
        model=model_name(request),
        kind=outcome.kind,
        attempt=outcome.attempt,
        prompt_tokens=outcome.prompt_tokens + outcome.retrieved_tokens,
        cached_tokens=outcome.cached_tokens,
        retrieved_tokens=live.passages.tokens + outcome.retrieved_tokens,
        completion_tokens=outcome.completion_tokens,
        reasoning_tokens=outcome.reasoning_tokens,
        worker_ms=sum(live.worker_time.worked_ms.values()) + outcome.worker_ms,
        arrived_ms=request.arrived_ms,
        ended_ms=outcome.ended_ms,
    )
