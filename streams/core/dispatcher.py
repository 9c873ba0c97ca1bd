"""Places requests on workers, hands them over from prefill to decode, places them again and ends
them.

Owns the tables (fleet, admission, live requests, sessions) and appends effects to `out`. Which
event leads to what is `streams/core/router.py`'s; who is chosen is `streams/core/placement.py`'s.
"""

from schemas.errors import Cancelled, DeadlineExceeded, QueueFull, WorkerLost
from schemas.records import (
    CancelReason,
    DecisionKind,
    Mode,
    OutcomeKind,
    Reason,
    Role,
    WireError,
    WorkPhase,
)
from streams.config import RouterSettings
from streams.core import writing
from streams.core.admission import CLASSES, Admission
from streams.core.effects import Decide, Effect, End
from streams.core.fleet import Fleet, Life, Worker
from streams.core.placement import POLICIES, Need, Placement, candidates, choose_decode
from streams.core.requests import NOBODY, Live, RequestTable, State
from streams.core.sessions import Sessions

_HANDED = {Reason.LEAST_WORK: Reason.PREFILL_DONE}
_DECODERS = (Role.DECODE, Role.REPLICA)


class Dispatcher:
    """The doing half of the core: everything that changes a request's place."""

    def __init__(self, router_id: str, settings: RouterSettings) -> None:
        self.router_id = router_id
        self.settings = settings
        self.policy = POLICIES[settings.policy]
        self.fleet = Fleet(router_id)
        self.admission = Admission(
            requests_max=settings.queue_requests_max,
            tokens_max=settings.queue_tokens_max,
            ageing_ms=settings.ageing_ms,
        )
        self.table = RequestTable(
            ended_max=settings.ended_max, early_cancels_max=settings.early_cancels_max
        )
        self.sessions = Sessions(sessions_max=settings.sessions_max, ttl_ms=settings.session_ttl_ms)
        self.out: list[Effect] = []

    def enqueue(self, live: Live, now_ms: int) -> None:
        """Put a request into admission; what has been placed before goes to the best class."""
        self.table.move(live, State.QUEUED, None)
        settings, request = self.settings, live.request
        prefill_ms = live.prompt_tokens * 1000 // settings.assumed_prefill_tokens_per_s
        decode_ms = int(request.sampling.max_tokens * settings.assumed_step_ms)
        shed = self.admission.arrive(
            live.request_id,
            level=0 if live.attempt else CLASSES[request.priority],
            tokens=live.prompt_tokens,
            work_ms=prefill_ms + decode_ms,
            deadline_ms=request.deadline_ms,
            since_ms=live.queued_ms,
            now_ms=now_ms,
        )
        for request_id in shed:
            self.shed(self.table.live[request_id], now_ms)

    def pump(self, now_ms: int) -> None:
        """Dispatch as much as credits allow: first hand-overs, in order, then the queue."""
        self.expire_queue(now_ms)
        while self.table.handovers:
            if not self._hand_over(next(iter(self.table.handovers.values())), now_ms):
                break
        while (request_id := self.admission.head(now_ms)) is not None:
            if not self._place(self.table.live[request_id], now_ms):
                break

    def expire_queue(self, now_ms: int) -> None:
        """End what waited in admission past its deadline."""
        for request_id in self.admission.expire(now_ms):
            self.expire(self.table.live[request_id], now_ms)

    def _place(self, live: Live, now_ms: int) -> bool:
        session = self.sessions.get(live.request.session_id, now_ms)
        need = Need(
            prompt_tokens=live.prompt_tokens,
            session=session,
            underway=self.table.underway,
            handover_ahead=self.settings.handover_ahead,
            local_after_ms=self.settings.local_after_ms,
        )
        placement = self.policy(need, self.fleet, now_ms)
        if placement is None:
            return False
        self.admission.remove(live.request_id)
        looked_at = candidates(
            self.fleet,
            _roles(placement.mode),
            (placement.prefill, placement.decode),
            self.settings.candidates_max,
            now_ms,
        )
        _begin(live, placement)
        kind = DecisionKind.PLACE if live.again is None else DecisionKind.REPLACE
        record = writing.decision(
            self.router_id,
            live,
            kind,
            live.again or placement.reason,
            placement.policy,
            now_ms,
            queue_length=len(self.admission),
            session=session,
            looked_at=looked_at,
        )
        self.out.append(Decide(record, live.partition))
        if placement.prefill is not None:
            self._dispatch(live, placement.prefill, WorkPhase.PREFILL, now_ms)
        elif placement.decode is not None:
            self._dispatch(live, placement.decode, WorkPhase.DECODE, now_ms)
        return True

    def _hand_over(self, live: Live, now_ms: int) -> bool:
        """Dispatch decode after prefill; without the KV where its handle is too old."""
        session = self.sessions.get(live.request.session_id, now_ms)
        worker, reason = choose_decode(session, self.fleet, Role.DECODE, now_ms)
        lost = worker is None and not self.fleet.any_lives(Role.DECODE, now_ms)
        if lost:  # the pool is gone: a replica computes the prompt again
            worker, _ = choose_decode(session, self.fleet, Role.REPLICA, now_ms)
        if worker is None:
            return False
        reason = Reason.NO_WORKER if lost else _HANDED.get(reason, reason)
        fresh_until_ms = now_ms + self.settings.handover_margin_ms
        if lost or live.kv is None or live.kv.expires_at_ms < fresh_until_ms:
            reason = Reason.NO_WORKER if lost else Reason.KV_EXPIRED
            self.stop_prefill(live, now_ms)
            live.kv, live.mode = None, Mode.LOCAL
        live.decode = worker.life
        looked_at = candidates(
            self.fleet, (worker.role,), (worker,), self.settings.candidates_max, now_ms
        )
        record = writing.decision(
            self.router_id,
            live,
            DecisionKind.HANDOFF,
            reason,
            self.settings.policy,
            now_ms,
            queue_length=len(self.admission),
            session=session,
            looked_at=looked_at,
        )
        self.out.append(Decide(record, live.partition))
        self._dispatch(live, worker, WorkPhase.DECODE, now_ms)
        live.kv = None  # used once
        return True

    def _dispatch(self, live: Live, worker: Worker, phase: WorkPhase, now_ms: int) -> None:
        self.out.append(writing.work(self.router_id, live, worker, phase, now_ms))
        prefill = phase is WorkPhase.PREFILL
        self.charge(live, worker, 0 if live.kv is not None else live.prompt_tokens)
        self.table.move(live, State.PREFILLING if prefill else State.DECODING, worker.life)

    def charge(self, live: Live, worker: Worker, tokens: int) -> None:
        """Spend one of a worker's credits on a request."""
        self.fleet.take(worker, tokens)
        live.charged, live.charged_tokens = worker.role, tokens

    def refund(self, live: Live) -> None:
        """Give back the credit that a request spends, if it does."""
        if live.charged is not None and live.life is not None:
            self.fleet.release(live.life, live.charged, live.charged_tokens)
        live.charged, live.charged_tokens = None, 0

    def again(self, live: Live, reason: Reason, error: WireError | None, now_ms: int) -> None:
        """The attempt is void: place the request again, or end it where that is useless."""
        settings = self.settings
        live.error = error or live.error
        if live.cancel is not None:
            self.cancelled(live, now_ms)
        elif live.attempt >= settings.attempts_max:
            last = live.error or WorkerLost("its worker fell silent").to_wire()
            message = f"{live.request_id}: gave up after {live.attempt} attempts: {last.message}"
            error = WireError(code=last.code, message=message, retriable=last.retriable)
            self.fail(live, Reason.ATTEMPTS_EXHAUSTED, error, now_ms)
        else:
            if live.mode is Mode.REMOTE and not live.kv_received:
                self.stop_prefill(live, now_ms)
            self.refund(live)
            live.again, live.kv = reason, None
            self.enqueue(live, now_ms)

    def stop_prefill(self, live: Live, now_ms: int) -> None:
        """Have the prefill worker free what it holds of this attempt."""
        self.stop(live, live.prefill, (Role.PREFILL,), now_ms)

    def stop_decode(self, live: Live, now_ms: int) -> None:
        """Have the decode or replica worker stop this attempt."""
        self.stop(live, live.decode, _DECODERS, now_ms)

    def stop(self, live: Live, life: Life, roles: tuple[Role, ...], now_ms: int) -> None:
        """Cancel on one worker, if that life of it is still known."""
        if life == NOBODY or self.fleet.is_lost(life, now_ms):
            return
        for role in roles:
            worker = self.fleet.worker(life[0], role)
            if worker is not None and worker.epoch == life[1]:
                self.out.append(writing.cancel_work(live, worker, now_ms))
                return

    def shed(self, live: Live, now_ms: int) -> None:
        """End a request for which the queue has no room."""
        message = f"{live.request_id}: the admission queue is full; try again later"
        self._end(live, OutcomeKind.SHED, Reason.QUEUE_FULL, QueueFull(message).to_wire(), now_ms)

    def expire(self, live: Live, now_ms: int) -> None:
        """End a request whose deadline has passed."""
        serving = any(self.fleet.any_lives(role, now_ms) for role in _DECODERS)
        reason = Reason.DEADLINE_PASSED if serving else Reason.NO_WORKER
        why = "was not answered in time" if serving else "no worker was there to answer it"
        message = f"{live.request_id}: {why}; it waited {max(0, now_ms - live.queued_ms)} ms"
        self._end(live, OutcomeKind.EXPIRED, reason, DeadlineExceeded(message).to_wire(), now_ms)

    def cancelled(self, live: Live, now_ms: int) -> None:
        """End a request that was given up and that no worker ends."""
        reason = Reason((live.cancel or CancelReason.CLIENT_REQUEST).value)
        error = Cancelled(f"{live.request_id}: cancelled: {reason.value}").to_wire()
        self._end(live, OutcomeKind.CANCELLED, reason, error, now_ms)

    def fail(self, live: Live, reason: Reason, error: WireError, now_ms: int) -> None:
        """End a request that cannot be answered."""
        self._end(live, OutcomeKind.FAILED, reason, error, now_ms)

    def _end(
        self, live: Live, kind: OutcomeKind, reason: Reason, error: WireError, now_ms: int
    ) -> None:
        record = writing.decision(
            self.router_id,
            live,
            _ENDINGS[kind],
            reason,
            self.settings.policy,
            now_ms,
            queue_length=len(self.admission),
        )
        self.out.append(Decide(record, live.partition))
        outcome = writing.outcome(self.router_id, live, kind, error, now_ms)
        if live.state is not State.QUEUED and live.mode is Mode.REMOTE and not live.kv_received:
            self.stop_prefill(live, now_ms)
        self.out.append(End(outcome, live.partition, live.request.gateway_partition))
        self.leave(live, now_ms)

    def leave(self, live: Live, now_ms: int) -> None:
        """The request has ended, by whomever: free what it held and remember its id."""
        self.admission.remove(live.request_id)
        self.refund(live)
        until_ms = max(live.request.deadline_ms, now_ms) + self.settings.deadline_grace_ms
        self.table.remove(live, until_ms)


def _begin(live: Live, placement: Placement) -> None:
    """A new attempt starts from nothing."""
    live.attempt += 1
    live.mode = placement.mode
    live.prefill = NOBODY if placement.prefill is None else placement.prefill.life
    live.decode = NOBODY if placement.decode is None else placement.decode.life
    live.kv, live.kv_received = None, False
    live.sent_tokens = live.sent_chars = live.first_token_ms = live.cached_tokens = 0


def _roles(mode: Mode) -> tuple[Role, ...]:
    if mode is Mode.REPLICA:
        return (Role.REPLICA,)
    return (Role.DECODE,) if mode is Mode.LOCAL else (Role.PREFILL, Role.DECODE)


_ENDINGS = {
    OutcomeKind.SHED: DecisionKind.SHED,
    OutcomeKind.EXPIRED: DecisionKind.EXPIRE,
    OutcomeKind.CANCELLED: DecisionKind.CANCEL,
    OutcomeKind.FAILED: DecisionKind.FAIL,
}
