"""Places requests on workers, hands them over from prefill to decode, places them again and ends
them.

Owns the tables (fleet, admission, live requests, sessions) and appends effects to `out`. Which
event leads to what is `streams/core/router.py`'s; who is chosen is
`streams/core/placement/placer.py`'s; what is told to workers, and which credits it takes, is
`streams/core/handlers/orders.py`'s.
"""

from dataclasses import replace

from schemas.errors import Cancelled, DeadlineExceeded, QueueFull, WorkerLost
from schemas.records import (
    CancelReason,
    Candidate,
    DecisionKind,
    KvHandle,
    Mode,
    Orchestration,
    OutcomeKind,
    Reason,
    Role,
    Session,
    WireError,
)
from streams.config import RouterSettings
from streams.core.effects import Decide, Effect, End
from streams.core.fleet.members import Fleet
from streams.core.handlers import decisions
from streams.core.handlers.orders import DECODERS, Orders
from streams.core.placement.case import Need
from streams.core.placement.placer import Placement, Placer
from streams.core.placement.ppd_table import Table
from streams.core.placement.selection import candidates
from streams.core.requests.admission import CLASSES, Admission
from streams.core.requests.live import BEGINS, NOBODY, Live, RequestTable, State
from streams.core.requests.sessions import Sessions

_ROLES = {
    Mode.REMOTE: (Role.PREFILL, Role.DECODE),
    Mode.LOCAL: (Role.DECODE,),
    Mode.REPLICA: (Role.REPLICA,),
}
# Looked up once: naming a member of an enumeration costs more than comparing with it.
_PLACE, _REPLACE = DecisionKind.PLACE, DecisionKind.REPLACE
_QUEUED, _PREFILL_FIRST = State.QUEUED, Orchestration.PREFILL_FIRST
_ENDINGS = {
    OutcomeKind.SHED: DecisionKind.SHED,
    OutcomeKind.EXPIRED: DecisionKind.EXPIRE,
    OutcomeKind.CANCELLED: DecisionKind.CANCEL,
    OutcomeKind.FAILED: DecisionKind.FAIL,
}


class Dispatcher:
    """The doing half of the core: everything that changes a request's place."""

    def __init__(
        self, router_id: str, settings: RouterSettings, table: Table | None = None
    ) -> None:
        self.router_id = router_id
        self.settings = settings
        self.placer = Placer(settings, table)
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
        self.orders = Orders(router_id, self.fleet, self.out)
        self.at_work: Live | None = None  # whom the present event is about, should it go wrong

    def take_out(self) -> list[Effect]:
        """The effects since the last call."""
        effects = self.out[:]
        self.out.clear()
        return effects

    def enqueue(self, live: Live, now_ms: int) -> None:
        """Put a request into admission; what has been placed before goes to the best class."""
        self.table.move(live, _QUEUED)
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
        self.at_work = live
        need = self._need(live, now_ms)
        placement = self.placer.place(need, self.fleet, now_ms)
        if placement is None:
            return False
        self.admission.remove(live.request_id)
        most, roles = self.settings.candidates_max, _ROLES[placement.mode]
        looked_at = candidates(self.fleet, placement.chosen, roles, most, now_ms)
        _begin(live, placement, now_ms)
        kind = _PLACE if live.again is None else _REPLACE
        self._decide(
            live,
            kind,
            live.again or placement.reason,
            now_ms,
            session=need.session,
            placement=placement,
            looked_at=looked_at,
        )
        kv = self._session_kv(live, need.session, now_ms)
        if placement.prefill is not None:
            tokens = live.prompt_tokens - placement.prefill_cached_tokens
            self.orders.charge(live, placement.prefill, max(1, tokens))
        if placement.decode is not None and (placement.prefill is None or live.is_paired):
            self.orders.charge(live, placement.decode, 0 if live.is_paired else live.prompt_tokens)
        self.table.move(live, BEGINS[live.orchestration])
        self.orders.dispatch(live, now_ms, kv=kv)
        return True

    def _need(self, live: Live, now_ms: int) -> Need:
        """What placement has to know; what it computed for the request stays with it."""
        if live.need is None:
            live.need = Need.of(live.request)
        live.need.session = self._session(live, now_ms)
        live.need.waiting = len(self.admission)
        live.need.underway = self.table.underway
        return live.need

    def _session(self, live: Live, now_ms: int) -> Session | None:
        """What is known of the request's session. A client may send its next turn as soon as it has
        the last token, which is before the outcome of the turn before is here: then it is taken
        from that request."""
        session_id = live.request.session_id
        session, before = (
            self.sessions.get(session_id, now_ms),
            self.table.of_session.get(session_id),
        )
        if before is None or before is live:
            return session
        return Session(
            session_id=session_id,
            decode_worker=before.decode[0],
            worker_epoch=before.decode[1],
            context_tokens=before.prompt_tokens,
            turns=1 if session is None else session.turns + 1,
            last_used_ms=now_ms,
        )

    def _session_kv(self, live: Live, session: Session | None, now_ms: int) -> KvHandle | None:
        """The KV of the session's last answer, for prefill to read instead of computing it.

        Used once: whoever asks first gets it, and a rebuild forgets it (`requests/recovery.py`).
        """
        if session is None or session.kv is None:
            return None
        if live.orchestration is not _PREFILL_FIRST:
            return None
        kv = session.kv
        self.sessions.put(replace(session, kv=None), live.partition)
        worker = self.fleet.worker(kv.worker_id, Role.DECODE)
        if worker is None or worker.epoch != kv.worker_epoch or not worker.lives(now_ms):
            return None
        return kv if kv.expires_at_ms > now_ms + self.settings.handover_margin_ms else None

    def _hand_over(self, live: Live, now_ms: int) -> bool:
        """Dispatch decode after prefill; without the KV where its handle is too old."""
        self.at_work = live
        need = self._need(live, now_ms)
        worker, reason = self.placer.handoff(need, self.fleet, now_ms)
        if worker is None:
            return False
        if live.handed_unheard:
            self.again(live, Reason.ROUTER_RESTARTED, None, now_ms)
            return True
        fresh_until_ms = now_ms + self.settings.handover_margin_ms
        to_replica = worker.role is Role.REPLICA  # the pool is gone: it computes the prompt again
        producer = self.fleet.view.members.get(live.prefill[0])
        apart = producer is not None and not worker.keeps_time_with(producer)
        if to_replica or apart or live.kv is None or live.kv.expires_at_ms < fresh_until_ms:
            reason = reason if to_replica else Reason.KV_EXPIRED
            self.orders.void_prefill(live, now_ms)
            live.kv, live.mode, live.orchestration = None, Mode.LOCAL, Orchestration.NONE
        live.decode = worker.life
        most, roles = self.settings.candidates_max, (worker.role,)
        found = candidates(self.fleet, {worker: 0}, roles, most, now_ms)
        self._decide(
            live, DecisionKind.HANDOFF, reason, now_ms, session=need.session, looked_at=found
        )
        self.orders.charge(live, worker, 0 if live.kv is not None else live.prompt_tokens)
        self.table.move(live, State.DECODING)
        self.orders.dispatch(live, now_ms)
        return True

    def allocated(self, live: Live, now_ms: int) -> None:
        """The decode worker of a pair has made room: dispatch prefill, if it is still there."""
        if self.fleet.is_lost(live.prefill, now_ms):
            self.again(live, Reason.WORKER_LOST, None, now_ms)
            return
        self.table.move(live, State.PAIRED)
        self.orders.dispatch(live, now_ms)

    def again(self, live: Live, reason: Reason, error: WireError | None, now_ms: int) -> None:
        """The attempt is void: place the request again, or end it where that is useless."""
        settings = self.settings
        live.error = error or live.error
        live.losses += reason is Reason.WORKER_LOST
        live.faults += reason not in (Reason.ROUTER_RESTARTED, Reason.WORKER_LOST)
        if live.cancel is not None:
            self.cancelled(live, now_ms)
        elif live.faults >= settings.attempts_max or live.losses >= settings.losses_max:
            last = live.error or WorkerLost("its worker fell silent").to_wire()
            tries = live.faults + live.losses
            message = f"{live.request_id}: gave up after {tries} attempts: {last.message}"
            error = WireError(code=last.code, message=message, retriable=last.retriable)
            self.fail(live, Reason.ATTEMPTS_EXHAUSTED, error, now_ms)
        else:
            self._decide(live, DecisionKind.VOID, reason, now_ms)  # before anybody drops it
            self.orders.void(live, now_ms)
            live.again, live.kv = reason, None
            self.enqueue(live, now_ms)

    def stop(self, live: Live, now_ms: int) -> None:
        """The request was given up: have the worker that will end it do so now."""
        assert live.cancel is not None
        self._decide(live, DecisionKind.CANCEL, Reason(live.cancel.value), now_ms)
        self.orders.stop(live, now_ms)
        self.table.move(live, State.CANCELLING)

    def shed(self, live: Live, now_ms: int) -> None:
        """End a request for which the queue has no room."""
        message = f"{live.request_id}: the admission queue is full; try again later"
        self._end(live, OutcomeKind.SHED, Reason.QUEUE_FULL, QueueFull(message).to_wire(), now_ms)

    def expire(self, live: Live, now_ms: int) -> None:
        """End a request whose deadline has passed."""
        serving = any(self.fleet.any_lives(role, now_ms) for role in DECODERS)
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
        self._decide(live, _ENDINGS[kind], reason, now_ms)
        outcome = decisions.outcome(self.router_id, live, kind, error, now_ms)
        self.orders.void(live, now_ms)
        self.out.append(End(outcome, live.partition, live.request.gateway_partition))
        self.leave(live, now_ms)

    def ended(self, live: Live, now_ms: int) -> None:
        """A worker ended the request; what a pair's prefill worker still does is useless."""
        if live.is_paired:
            self.orders.refund(live, live.decode)
            self.orders.void(live, now_ms)
        self.leave(live, now_ms)

    def leave(self, live: Live, now_ms: int) -> None:
        """The request has ended, by whomever: free what it held and remember its id."""
        self.admission.remove(live.request_id)
        self.orders.refund(live)
        until_ms = max(live.request.deadline_ms, now_ms) + self.settings.deadline_grace_ms
        self.table.remove(live, until_ms)

    def _decide(
        self,
        live: Live,
        kind: DecisionKind,
        reason: Reason,
        now_ms: int,
        *,
        session: Session | None = None,
        placement: Placement | None = None,
        looked_at: tuple[Candidate, ...] = (),
    ) -> None:
        policy = live.need.policy if live.need is not None else ""
        record = decisions.decision(
            self.router_id,
            live,
            kind,
            reason,
            placement.policy if placement is not None else policy or self.settings.policy,
            now_ms,
            queue_length=len(self.admission),
            session=session,
            placement=placement,
            looked_at=looked_at,
        )
        self.out.append(Decide(record, live.partition))


def _begin(live: Live, placement: Placement, now_ms: int) -> None:
    """A new attempt starts from nothing."""
    live.attempt, live.unheard, live.placed_ms = live.next_attempt, 0, now_ms
    live.mode, live.orchestration = placement.mode, placement.orchestration
    live.prefill = NOBODY if placement.prefill is None else placement.prefill.life
    live.decode = NOBODY if placement.decode is None else placement.decode.life
    live.kv, live.kv_received, live.handed_unheard = None, False, False
    live.sent_tokens = live.sent_chars = live.cached_tokens = 0
    live.first_token_ms = live.first_heard_ms = 0
