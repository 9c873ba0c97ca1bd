"""Places waiting requests on workers, and hands over from prefill to decode, as credits allow.

`streams/core/placement` chooses the workers; `streams/core/handlers/orders.py` sends the work and
spends the credits. Called by `streams/core/router.py` after every event.
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
from streams.core.handlers.continuing import Continuing
from streams.core.handlers.endings import Endings
from streams.core.handlers.orders import Orders
from streams.core.placement.answer import Placement
from streams.core.placement.case import RequestCase, WarmedPrefix
from streams.core.placement.placer import Placer
from streams.core.placement.selection import candidates
from streams.core.requests.context import beginning
from streams.core.requests.live import NOBODY, LiveRequest
from streams.core.requests.sessions import session_key
from streams.core.states import BEGINS, State
from streams.core.tables import RouterTables

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
        continuing: Continuing,
        placer: Placer,
    ) -> None:
        self._tables = tables
        self._orders = orders
        self._endings = endings
        self._continuing = continuing
        self._placer = placer

    def dispatch_waiting(self, now_ms: int) -> None:
        """Dispatch what credits allow: first hand-overs, in order, then the queue."""
        tables = self._tables
        if not tables.admission and not tables.requests.handovers:
            return
        self._endings.expire_queue(now_ms)
        self._hand_over_waiting(now_ms)
        while (request_id := tables.admission.head(now_ms)) is not None:
            live = tables.requests.by_id[request_id]
            with tables.about(live):
                if not self._place(live, now_ms):
                    break

    def _hand_over_waiting(self, now_ms: int) -> None:
        """Hand over in order, until no decode worker has credit. Skip requests that wait for
        their prefill worker's own decode worker."""
        tables, full = self._tables, set[Life]()  # prefill workers whose decode partner is full
        for live in [*tables.requests.handovers.values()]:
            if live.prefill in full and self._waits_for_partner(live, now_ms):
                continue
            with tables.about(live):
                if self._hand_over(live, now_ms):
                    continue
            if not self._waits_for_partner(live, now_ms):
                break
            full.add(live.prefill)

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
        tables.admission.serve(live.request_id)
        limit, roles = CANDIDATES_MAX, _ROLES[placement.mode]
        looked_at = candidates(tables.fleet, placement.chosen, roles, limit, now_ms)
        if live.unheard:  # the last router may have sent that attempt to a worker not known here
            self._continuing.mark(live, live.attempt + live.unheard)
        _begin(live, placement, now_ms)
        self._endings.decide(
            live,
            DecisionKind.PLACE if live.replaced_for is None else DecisionKind.REPLACE,
            live.replaced_for or placement.reason,
            now_ms,
            session=case.session,
            placement=placement,
            looked_at=looked_at,
        )
        self._repeat_notices(live)
        kv = self._session_kv(live, case.session, now_ms)
        self._charge(live, placement, now_ms)
        self._count(live, placement, now_ms)
        tables.requests.move(live, BEGINS[live.orchestration])
        self._orders.dispatch(live, now_ms, kv=kv)
        return True

    def _repeat_notices(self, live: LiveRequest) -> None:
        """Send the reader the notices of earlier attempts' probes again: their workers may not have
        sent them, and the new attempt's worker gets only the tokens."""
        for notice in [probed.notice for probed in live.probed if probed.notice is not None]:
            self._tables.effects.append(NotifyRetrieval(notice, live.request.gateway_partition))

    def _charge(self, live: LiveRequest, placement: Placement, now_ms: int) -> None:
        """Spend an attempt's credits; the hand-over spends the one of decode after prefill."""
        begins_ms = now_ms + round(placement.first_ms)
        if placement.prefill is not None:
            tokens = live.prompt_tokens - placement.prefill_cached_tokens
            self._orders.charge(live, placement.prefill, max(1, tokens), begins_ms)
        if placement.decode is not None and (placement.prefill is None or live.is_paired):
            tokens = 0 if live.is_paired else live.prompt_tokens
            self._orders.charge(live, placement.decode, tokens, begins_ms)

    def _count(self, live: LiveRequest, placement: Placement, now_ms: int) -> None:
        """Count the estimated time of the prompt's computation as demand."""
        speeds, tokens = self._placer.estimates.speeds, live.prompt_tokens
        prefill_ms = append_ms = 0.0
        if placement.prefill is not None:
            tokens -= placement.prefill_cached_tokens
            prefill_ms = speeds.prefill_base_ms + speeds.prefill_ms(
                float(tokens), live.prompt_tokens
            )
        else:
            tokens -= placement.decode_cached_tokens
            append_ms = speeds.append_base_ms + speeds.append_ms(float(tokens), live.prompt_tokens)
        self._tables.demand.placed.add(now_ms, prefill_ms=prefill_ms, append_ms=append_ms)

    def _case(self, live: LiveRequest, now_ms: int) -> RequestCase:
        """Return the input of placement; what placement computes for the request stays in it."""
        if live.case is None:
            live.case = RequestCase.from_request(live.request, live.prior_tokens)
            live.case.warm = live.warm
        live.case.session = self._session(live, now_ms)
        live.case.waiting = len(self._tables.admission)
        live.case.before_decode = self._tables.requests.before_decode
        return live.case

    def _session(self, live: LiveRequest, now_ms: int) -> Session | None:
        """Return the state of the request's session, if any. A client may send its next turn once
        it has the last token, before this router has read the last turn's outcome: then the live
        request of that turn gives the state."""
        session_id, key = live.request.session_id, session_key(live.request)
        session = self._tables.sessions.get(key, now_ms)
        before = self._tables.requests.by_session.get(key)
        if before is None or before is live:
            return session
        return Session(
            session_id=session_id,
            decode_worker=before.decode[0],
            worker_epoch=before.decode[1],
            context_tokens=before.prompt_tokens,
            turns=1 if session is None else session.turns + 1,
            last_used_ms=now_ms,
            tenant=live.request.tenant,
        )

    def _session_kv(
        self, live: LiveRequest, session: Session | None, now_ms: int
    ) -> KvHandle | None:
        """Return the KV of the session's last answer, which prefill reads instead of computing it.

        Used once: the first request gets it, and a rebuild drops it (`requests/recovery.py`).
        """
        if session is None or session.kv is None:
            return None
        if live.orchestration is not Orchestration.PREFILL_FIRST:
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
            case, tables.fleet, now_ms, prefill=live.prefill, decode=live.decode
        )
        if worker is None:
            return False
        if live.handed_unheard:
            self._endings.requeue(live, Reason.ROUTER_RESTARTED, None, now_ms)
            return True
        if not self._kv_reaches(live, worker, now_ms):  # the worker computes the prompt again
            reason = reason if worker.role is Role.REPLICA else Reason.KV_EXPIRED
            if worker.life != live.prefill:  # a worker frees its own KV when it takes the work
                self._orders.void_prefill(live, now_ms)
            live.kv, live.mode, live.orchestration = None, Mode.LOCAL, Orchestration.NONE
        live.decode = worker.life
        limit, roles = CANDIDATES_MAX, (worker.role,)
        looked_at = candidates(tables.fleet, {worker: 0}, roles, limit, now_ms)
        self._endings.decide(
            live, DecisionKind.HANDOFF, reason, now_ms, session=case.session, looked_at=looked_at
        )
        tokens = 0 if live.kv is not None else live.prompt_tokens
        self._orders.charge(live, worker, tokens, now_ms)
        tables.requests.move(live, State.DECODING)
        self._orders.dispatch(live, now_ms)
        return True

    def _kv_reaches(self, live: LiveRequest, worker: Worker, now_ms: int) -> bool:
        """Return whether the worker can still read the KV that prefill has computed."""
        producer = self._tables.fleet.view.members.get(live.prefill[0])
        if worker.role is Role.REPLICA:  # no decode worker is left, and replicas read no KV
            return False
        if producer is not None and not worker.keeps_time_with(producer):
            return False
        fresh_until_ms = now_ms + HANDOVER_MARGIN_MS
        return live.kv is not None and live.kv.expires_at_ms >= fresh_until_ms


def _begin(live: LiveRequest, placement: Placement, now_ms: int) -> None:
    """Set the fields of a new attempt, which starts at the answer's beginning or continues it."""
    live.attempt, live.unheard, live.placed_ms = live.next_attempt, 0, now_ms
    live.mode, live.orchestration = placement.mode, placement.orchestration
    live.prefill = NOBODY if placement.prefill is None else placement.prefill.life
    live.decode = NOBODY if placement.decode is None else placement.decode.life
    live.kv, live.kv_received, live.handed_unheard = None, False, False
    live.sent_tokens, live.sent_chars = live.prior_tokens, live.prior_chars
    live.first_token_ms = live.first_heard_ms = live.cached_tokens = 0
