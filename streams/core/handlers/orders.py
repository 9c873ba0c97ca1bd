"""Sends workers the work and cancellations of a request, and counts the credits that it spends.

A cancellation is void or not. Void: the worker drops the attempt without a record, because the
router places the request again or ends it itself. Not void: the worker ends the request with an
outcome. A worker reads its records in order, so the credit of a voided attempt is free at once.

Decides nothing: the other handlers call this one after they have moved the request.
"""

from schemas.records import CancelWork, KvHandle, Mode, Orchestration, Role, Work, WorkPhase
from streams.core.effects import Dispatch, Effect
from streams.core.fleet.workers import DECODERS, ActiveAnswer, Fleet, Life, Worker
from streams.core.requests.live import NOBODY, Charge, LiveRequest
from streams.core.requests.probe_results import probes_of
from streams.core.states import State


class Orders:
    """Appends dispatches to `effects`; counts credits in the fleet."""

    def __init__(self, router_id: str, fleet: Fleet, effects: list[Effect]) -> None:
        self._router_id = router_id
        self._fleet = fleet
        self._effects = effects

    def charge(self, live: LiveRequest, worker: Worker, tokens: int, begins_ms: int) -> None:
        """Spend one of a worker's credits on a request whose answer should begin at `begins_ms`."""
        assert worker.role not in live.charges, f"{live.request_id}: charged twice"
        request, answer = live.request, None
        if worker.role in DECODERS:
            answer = ActiveAnswer(
                live.request_id,
                prompt_tokens=live.prompt_tokens,
                max_tokens=request.sampling.max_tokens - live.prior_tokens,
                deadline_ms=request.deadline_ms,
                begins_ms=begins_ms,
            )
        self._fleet.add_request(worker, tokens, answer)
        live.charges[worker.role] = Charge(worker.life, tokens)

    def refund(self, live: LiveRequest, life: Life | None = None) -> None:
        """Give back a request's credits: all, or those of one worker incarnation."""
        for role, charge in list(live.charges.items()):
            if life is None or charge.life == life:
                del live.charges[role]
                self._fleet.release(charge.life, role, charge.tokens, live.request_id)

    def dispatch(self, live: LiveRequest, now_ms: int, kv: KvHandle | None = None) -> None:
        """Send the work that the attempt's state needs. Workers ignore repeated work."""
        prefill, decode = (
            self.charged_worker(live, Role.PREFILL),
            self.charged_worker(live, *DECODERS),
        )
        state = live.state
        if state is State.DECODING and decode is not None:
            self._send(live, decode, now_ms, kv=live.kv)
        elif state is State.PREFILLING and prefill is not None:
            self._send(live, prefill, now_ms, kv=kv)
        elif state is State.ALLOCATING and prefill is not None:
            self._send_waiting(live, decode, prefill, now_ms)
        elif state is State.PAIRED and prefill is not None and decode is not None:
            target = live.kv
            if live.orchestration is Orchestration.CONCURRENT:
                target = _peer_handle(live, decode, 0)
                self._send_waiting(live, decode, prefill, now_ms)
            self._send(live, prefill, now_ms, kv_target=target)
        live.kv = None  # used once

    def dispatch_again(self, live: LiveRequest, now_ms: int) -> None:
        """Send the work that the last router may have decided and not sent, after a takeover.

        A hand-over without its prefill's report, and KV that was received, show that it was sent.
        """
        lives = [self._fleet.worker(c.life[0], role) for role, c in live.charges.items()]
        if live.kv_received or not all(w is not None and w.is_alive(now_ms) for w in lives):
            return
        if live.state is State.DECODING and live.mode is Mode.REMOTE and live.kv is None:
            return
        self.dispatch(live, now_ms)

    def _send_waiting(
        self, live: LiveRequest, decode: Worker | None, prefill: Worker, now_ms: int
    ) -> None:
        """Send decode of a pair, which waits for the KV that prefill will write."""
        assert decode is not None
        self._send(live, decode, now_ms, kv=_peer_handle(live, prefill, live.prompt_tokens))

    def _send(
        self,
        live: LiveRequest,
        worker: Worker,
        now_ms: int,
        *,
        kv: KvHandle | None = None,
        kv_target: KvHandle | None = None,
    ) -> None:
        self._effects.append(
            work(self._router_id, live, worker, now_ms, kv=kv, kv_target=kv_target)
        )

    def charged_worker(self, live: LiveRequest, *roles: Role) -> Worker | None:
        """Return the worker on which the request spends a credit in one of the roles, if any."""
        for role in roles:
            if role in live.charges:
                return self._fleet.worker(live.charges[role].life[0], role)
        return None

    def void(self, live: LiveRequest, now_ms: int) -> None:
        """Have all workers of the attempt drop it, and give back all its credits."""
        for role, charge in live.working.items():
            self._cancel(live, charge.life, role, now_ms, void=True)
        if live.keeps_kv:
            self.void_prefill(live, now_ms)
        if live.handed_unheard:  # the last router may have sent it to the placed worker
            for role in DECODERS:
                self._cancel(live, live.decode, role, now_ms, void=True)
        self.refund(live)

    def void_again(self, live: LiveRequest, now_ms: int, *, except_worker: str = "") -> None:
        """Have workers drop an attempt that the last router voided, perhaps without sending that.

        `except_worker` is one that has ended the request and needs no cancellation.
        """
        for life, role in ((live.prefill, Role.PREFILL), *((live.decode, r) for r in DECODERS)):
            if life[0] != except_worker:
                self._cancel(live, life, role, now_ms, void=True)

    def void_prefill(self, live: LiveRequest, now_ms: int) -> None:
        """Have the prefill worker free the KV that it keeps."""
        self._cancel(live, live.prefill, Role.PREFILL, now_ms, void=True)

    def stop(self, live: LiveRequest, now_ms: int) -> None:
        """Have the last holder end the request with an outcome, and the others drop it."""
        ender = live.holders[-1]
        for role, charge in live.working.items():
            self._cancel(live, charge.life, role, now_ms, void=charge.life != ender)
        for charge in list(live.charges.values()):
            if charge.life != ender:
                self.refund(live, charge.life)
        if live.keeps_kv and live.prefill != ender:  # the worker that ends it frees that KV too
            self.void_prefill(live, now_ms)

    def _cancel(
        self, live: LiveRequest, life: Life, role: Role, now_ms: int, *, void: bool
    ) -> None:
        """Cancel on one worker, unless that incarnation of it is lost."""
        if life == NOBODY or self._fleet.is_lost(life, now_ms):
            return
        worker = self._fleet.worker(life[0], role)
        if worker is not None and worker.epoch == life[1]:
            self._effects.append(_cancel_work(live, worker, now_ms, void=void))


def work(
    router_id: str,
    live: LiveRequest,
    worker: Worker,
    now_ms: int,
    *,
    kv: KvHandle | None = None,
    kv_target: KvHandle | None = None,
) -> Dispatch:
    """Return the work of the current attempt for one worker, according to the worker's role.

    Decode of a pair sends its tokens from the first one on, so that prefill's death leaves no gap.
    """
    request, paired = live.request, live.is_paired
    record = Work(
        request_id=request.request_id,
        session_id=request.session_id,
        attempt=live.attempt,
        router_id=router_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        phase=WorkPhase.PREFILL if worker.role is Role.PREFILL else WorkPhase.DECODE,
        mode=live.mode,
        orchestration=live.orchestration,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        arrived_ms=request.arrived_ms,
        deadline_ms=request.deadline_ms,
        gateway_partition=request.gateway_partition,
        prefill_worker=live.prefill[0],
        first_token_ms=live.first_token_ms,
        first_seq=live.prior_tokens if paired else live.sent_tokens,
        first_char=live.prior_chars if paired else live.sent_chars,
        cached_tokens=live.cached_tokens,
        kv=kv,
        dispatched_ms=now_ms,
        kv_target=kv_target,
        probes=None
        if worker.role is Role.PREFILL
        else probes_of(request, live.passage_ids, live.probed),
        prior_tokens=live.prior_tokens,
        prior_chars=live.prior_chars,
        cache_scope=request.cache_scope,
    )
    return Dispatch(worker.topic, worker.partition, record)


def _peer_handle(live: LiveRequest, peer: Worker, tokens: int) -> KvHandle:
    """Return a pair's other side as a handle without blocks; the engines name those themselves."""
    capability = peer.capability
    assert capability is not None, f"{peer.worker_id}: paired, but its engine is unknown"
    return KvHandle(
        worker_id=peer.worker_id,
        worker_epoch=peer.epoch,
        engine_id=capability.engine_id,
        engine_request_id=f"{live.request_id}.{live.attempt}",
        tokens=tokens,
        block_size=capability.block_size,
        expires_at_ms=live.request.deadline_ms,
    )


def _cancel_work(live: LiveRequest, worker: Worker, now_ms: int, *, void: bool) -> Dispatch:
    """Return the order to stop this attempt and all lower ones on one worker, and free their KV.

    If `void`, the worker reports nothing more of it; otherwise it ends the request with an outcome.
    """
    record = CancelWork(
        request_id=live.request_id,
        attempt=live.attempt,
        worker_id=worker.worker_id,
        at_ms=now_ms,
        void=void,
    )
    return Dispatch(worker.topic, worker.partition, record)
