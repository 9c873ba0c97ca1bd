"""Places waiting requests on workers, and hands over from prefill to decode, as credits allow.

`streams/core/placement` chooses the workers; `streams/core/handlers/orders.py` sends the work and
spends the credits. Called by `streams/core/router.py` after each event that can free credit or add
a request.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from schemas.records import (
    DecisionKind,
    Insert,
    KvHandle,
    Mode,
    Orchestration,
    Reason,
    Role,
    Session,
    WarmPrefix,
)
from streams.core.effects import NotifyRetrieval, WarmCache
from streams.core.fleet.workers import Life, Worker
from streams.core.handlers.endings import Endings
from streams.core.handlers.orders import Orders
from streams.core.placement.placer import Placer
from streams.core.placement.selection import candidates
from streams.core.requests.context import beginning
from streams.core.requests.live import (
    NOBODY,
    Attempt,
    LiveRequest,
    Placement,
    RequestCase,
    WarmedPrefix,
    model_name,
    session_key,
)
from streams.core.states import BEGINS, State
from streams.core.tables import ModelQueue, RouterTables

HANDOVER_MARGIN_MS: Final = 1_000  # a KV handle that expires sooner may not be read in time
CANDIDATES_MAX: Final = 4  # workers named in a decision, of which it keeps the best
_ROLES = {
    Mode.REMOTE: (Role.PREFILL, Role.DECODE),
    Mode.LOCAL: (Role.DECODE,),
    Mode.REPLICA: (Role.REPLICA,),
}


class Dispatcher:
    """Begins attempts and hands them over, on the router's tables."""

    def __init__(
        self,
        tables: RouterTables,
        orders: Orders,
        endings: Endings,
        placer: Placer,
    ) -> None:
        self._tables = tables
        self._orders = orders
        self._endings = endings
        self._placer = placer

    def dispatch_waiting(self, now_ms: int) -> None:
        """Dispatch what the credits of each model allow: hand-overs in order, then its queue."""
        if not (busy := self._tables.queues.busy()):
            return
        self.end_unserved(now_ms)
        for queue in busy:
            self._hand_over_waiting(queue, now_ms)
            self._place_waiting(queue, now_ms)

    def _place_waiting(self, queue: ModelQueue, now_ms: int) -> None:
        """Place requests of a model, until one has to wait for a worker's credit. Requests whose
        adapters no living worker can load are not in its way."""
        tables = self._tables
        for adapter in queue.unserved.adapters:
            if tables.fleet.of(queue.model).can_end(now_ms, adapter):
                for unserved_id in queue.unserved.take(adapter):
                    tables.let_wait(tables.requests.by_id[unserved_id], now_ms)
        while (request_id := queue.admission.head(now_ms)) is not None:
            live = tables.requests.by_id[request_id]
            with tables.about(live):
                if self._place(live, now_ms):
                    continue
            adapter = live.request.adapter
            if not adapter or tables.fleet.of(queue.model).can_end(now_ms, adapter):
                break
            queue.admission.remove(request_id)
            queue.unserved.add(request_id, adapter, live.prompt_tokens)

    def end_unserved(self, now_ms: int) -> None:
        """End the requests that full queues have shed, and those queued at their deadlines."""
        tables = self._tables
        if tables.shed:
            shed, tables.shed = tables.shed, []
            for live in [tables.requests.by_id[request_id] for request_id in shed]:
                with tables.about(live):
                    self._endings.end_shed(live, now_ms)
        for queue in tables.queues.busy():
            for request_id in queue.admission.expire(now_ms):
                live = tables.requests.by_id[request_id]
                with tables.about(live):
                    self._endings.end_expired(live, now_ms)

    def _hand_over_waiting(self, queue: ModelQueue, now_ms: int) -> None:
        """Hand over in order, until no decode worker has credit. Skip requests that wait for
        their prefill worker's own decode worker, or for one that can load their adapter."""
        tables, full = self._tables, set[Life]()  # prefill workers whose decode partner is full
        adapters = set[str]()  # that no decode worker with credit can load
        for live in [*queue.handovers.values()]:
            if live.request.adapter in adapters:
                continue
            if live.attempt.prefill in full and self._waits_for_partner(live, now_ms):
                continue
            with tables.about(live):
                if self._hand_over(live, now_ms):
                    continue
            if self._waits_for_partner(live, now_ms):
                full.add(live.attempt.prefill)
            elif live.request.adapter:
                adapters.add(live.request.adapter)
            else:
                break

    def _waits_for_partner(self, live: LiveRequest, now_ms: int) -> bool:
        return self._placer.waits_for_partner(self._case(live, now_ms))

    def warm(self, live: LiveRequest, history: Sequence[Insert], now_ms: int) -> None:
        """Have a prompt's beginning prefilled during the request's search, on the worker that would
        get it now, if that pays off. Only for a call's first choice: all begin alike."""
        tables, request, retrieval = self._tables, live.request, live.request.retrieval
        least_tokens = tables.settings.warm_tokens_min
        if not least_tokens or request.choice or retrieval is None:
            return
        begins = replace(request, prompt_tokens=beginning(request, history))
        case = RequestCase.from_request(begins)
        case.session = self._session(live, now_ms)
        target = self._placer.computes(case, tables.fleet, now_ms)
        if target is None or target[1] < least_tokens:
            return
        worker = target[0]
        block_size = 1 if worker.capability is None else worker.capability.block_size
        tokens = case.prompt_tokens // block_size * block_size
        live.warm = WarmedPrefix(life=worker.life, tokens=tokens)
        record = WarmPrefix(
            request_id=live.request_id,
            session_id=request.session_id,
            worker_id=worker.worker_id,
            worker_epoch=worker.epoch,
            model=request.model,
            adapter=request.adapter,
            prompt_tokens=begins.prompt_tokens,
            deadline_ms=retrieval.by_ms,
            cache_scope=request.cache_scope,
        )
        tables.effects.append(WarmCache(worker.topic, worker.partition, record))

    def _place(self, live: LiveRequest, now_ms: int) -> bool:
        """Begin an attempt; return False if the request has to wait."""
        tables, case = self._tables, self._case(live, now_ms)
        placement = self._placer.place(case, tables.fleet, now_ms)
        if placement is None:
            return False
        tables.queues.of(live.request.model).admission.serve(live.request_id)
        roles, pools = _ROLES[placement.mode], tables.fleet.of(live.request.model)
        looked_at = candidates(pools, placement.chosen, roles, CANDIDATES_MAX, now_ms)
        # The last router may have sent that attempt to a worker not known here.
        if live.attempt.unheard:
            self._endings.mark(live, live.attempt.number + live.attempt.unheard)
        _begin(live, placement, now_ms)
        self._orders.decide(
            live,
            DecisionKind.PLACE if live.failures.reason is None else DecisionKind.REPLACE,
            live.failures.reason or placement.reason,
            now_ms,
            session=case.session,
            placement=placement,
            looked_at=looked_at,
        )
        self._repeat_notices(live)
        kv = self._session_kv(live, case.session, now_ms)
        self._charge(live, placement, now_ms)
        self._count(live, placement, now_ms)
        tables.requests.move(live, BEGINS[live.attempt.orchestration])
        self._orders.dispatch(live, now_ms, kv=kv)
        return True

    def _repeat_notices(self, live: LiveRequest) -> None:
        """Send the reader the notices of earlier attempts' probes again: their workers may not have
        sent them, and the new attempt's worker gets only the tokens."""
        for notice in [
            probed.notice for probed in live.passages.probed if probed.notice is not None
        ]:
            self._tables.effects.append(NotifyRetrieval(notice, live.request.gateway_partition))

    def _charge(self, live: LiveRequest, placement: Placement, now_ms: int) -> None:
        """Spend an attempt's credits; the hand-over spends the one of decode after prefill."""
        begins_ms = now_ms + round(placement.first_ms)
        if placement.prefill is not None:
            tokens = live.prompt_tokens - placement.prefill_cached_tokens
            self._orders.charge(live, placement.prefill, max(1, tokens), begins_ms, now_ms)
        if placement.decode is not None and (placement.prefill is None or live.is_paired):
            tokens = 0 if live.is_paired else live.prompt_tokens
            self._orders.charge(live, placement.decode, tokens, begins_ms, now_ms)

    def _count(self, live: LiveRequest, placement: Placement, now_ms: int) -> None:
        """Count the estimated time of the prompt's computation as demand."""
        model, tokens = live.request.model, live.prompt_tokens
        speeds = self._placer.estimates_of(model).speeds
        prefill_ms = append_ms = 0.0
        if placement.prefill is not None:
            tokens -= placement.prefill_cached_tokens
            prefill_ms = speeds.prefill_base_ms + speeds.prefill_ms(
                float(tokens), live.prompt_tokens
            )
        else:
            tokens -= placement.decode_cached_tokens
            append_ms = speeds.append_base_ms + speeds.append_ms(float(tokens), live.prompt_tokens)
        demand = self._tables.queues.of(model).demand
        demand.placed.add(now_ms, prefill_ms=prefill_ms, append_ms=append_ms)

    def _case(self, live: LiveRequest, now_ms: int) -> RequestCase:
        """Return the input of placement; what placement computes for the request stays in it."""
        if live.case is None:
            live.case = RequestCase.from_request(live.request, live.prior.tokens)
            live.case.warm = live.warm
        live.case.session = self._session(live, now_ms)
        queue = self._tables.queues.of(live.request.model)
        live.case.waiting, live.case.before_decode = queue.waiting, queue.before_decode
        return live.case

    def _session(self, live: LiveRequest, now_ms: int) -> Session | None:
        """Return the state of the request's session, if any, and if its KV is of the same model and
        adapter. A client may send its next turn once it has the last token, before this router has
        read the last turn's outcome: then the live request of that turn gives the state."""
        session_id, key = live.request.session_id, session_key(live.request)
        name = model_name(live.request)
        session = self._tables.sessions.get(key, now_ms)
        if session is not None and session.model not in ("", name):
            session = None
        before = self._tables.requests.by_session.get(key)
        if before is None or before is live or model_name(before.request) != name:
            return session
        return Session(
            session_id=session_id,
            decode_worker=before.attempt.decode[0],
            worker_epoch=before.attempt.decode[1],
            context_tokens=before.prompt_tokens,
            turns=1 if session is None else session.turns + 1,
            last_used_ms=now_ms,
            tenant=live.request.tenant,
            model=name,
        )

    def _session_kv(
        self, live: LiveRequest, session: Session | None, now_ms: int
    ) -> KvHandle | None:
        """Return the KV of the session's last answer, which prefill reads instead of computing it.

        Used once: the first request gets it, and a rebuild drops it (`requests/recovery.py`).
        """
        if session is None or session.kv is None:
            return None
        if live.attempt.orchestration is not Orchestration.PREFILL_FIRST:
            return None
        kv, tables = session.kv, self._tables
        tables.sessions.put(replace(session, kv=None), live.partition)
        worker = tables.fleet.worker(kv.worker_id, Role.DECODE)
        if worker is None or worker.epoch != kv.worker_epoch or not worker.is_alive(now_ms):
            return None
        return kv if kv.expires_at_ms > now_ms + HANDOVER_MARGIN_MS else None

    def _hand_over(self, live: LiveRequest, now_ms: int) -> bool:
        """Dispatch decode after prefill; return False if no worker has credit for it."""
        tables, case = self._tables, self._case(live, now_ms)
        worker, reason = self._placer.handoff(
            case, tables.fleet, now_ms, prefill=live.attempt.prefill, decode=live.attempt.decode
        )
        if worker is None:
            return False
        if live.attempt.handed_unheard:
            self._endings.requeue(live, Reason.ROUTER_RESTARTED, None, now_ms)
            return True
        if not self._kv_reaches(live, worker, now_ms):  # the worker computes the prompt again
            reason = reason if worker.role is Role.REPLICA else Reason.KV_EXPIRED
            # A worker frees its own KV when it takes the work.
            if worker.life != live.attempt.prefill:
                self._orders.void_prefill(live, now_ms)
            attempt = live.attempt
            attempt.kv, attempt.mode, attempt.orchestration = None, Mode.LOCAL, Orchestration.NONE
        live.attempt.decode = worker.life
        pools = tables.fleet.of(live.request.model)
        looked_at = candidates(pools, {worker: 0}, (worker.role,), CANDIDATES_MAX, now_ms)
        self._orders.decide(
            live, DecisionKind.HANDOFF, reason, now_ms, session=case.session, looked_at=looked_at
        )
        tokens = 0 if live.attempt.kv is not None else live.prompt_tokens
        self._orders.charge(live, worker, tokens, now_ms, now_ms)
        tables.requests.move(live, State.DECODING)
        self._orders.dispatch(live, now_ms)
        return True

    def _kv_reaches(self, live: LiveRequest, worker: Worker, now_ms: int) -> bool:
        """Return whether the worker can still read the KV that prefill has computed."""
        producer = self._tables.fleet.view.members.get(live.attempt.prefill[0])
        if worker.role is Role.REPLICA:  # no decode worker is left, and replicas read no KV
            return False
        if producer is not None and not worker.keeps_time_with(producer):
            return False
        fresh_until_ms = now_ms + HANDOVER_MARGIN_MS
        return live.attempt.kv is not None and live.attempt.kv.expires_at_ms >= fresh_until_ms


def _begin(live: LiveRequest, placement: Placement, now_ms: int) -> None:
    """Begin a new attempt, which starts at the answer's beginning or continues it."""
    assert not live.attempt.charges, f"{live.request_id}: charged twice"
    prefill, decode = placement.prefill, placement.decode
    live.attempt = Attempt(
        number=live.next_attempt,
        placed_ms=now_ms,
        mode=placement.mode,
        orchestration=placement.orchestration,
        prefill=NOBODY if prefill is None else prefill.life,
        decode=NOBODY if decode is None else decode.life,
        sent_tokens=live.prior.tokens,
        sent_chars=live.prior.chars,
    )
