"""Writes a router's decisions, sends workers their work and cancellations, and counts credits.

A cancellation is void or not. Void: the worker drops the attempt without a record, because the
router places the request again or ends it itself. Not void: the worker ends the request with an
outcome. A worker reads its records in order, so the credit of a voided attempt is free at once.

Decides nothing: the other handlers call this one after they have moved the request. Builds their
records, with its own outcomes, from the request's live state.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from schemas.errors import clip_message
from schemas.records import (
    CancelWork,
    Candidate,
    Decision,
    DecisionKind,
    KvHandle,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    Reason,
    Role,
    Session,
    StreamEnd,
    WireError,
    Work,
    WorkPhase,
)
from streams.core.effects import Decide, Dispatch, Effect
from streams.core.fleet.workers import DECODERS, ActiveAnswer, Fleet, Life, Worker
from streams.core.requests.live import ALL_MET, NOBODY, Charge, LiveRequest, Placement
from streams.core.requests.probe_results import probes_of
from streams.core.states import State


class Orders:
    """Appends dispatches and decisions to the tables' effects; counts credits in the fleet."""

    def __init__(
        self,
        router_id: str,
        policy: str,
        fleet: Fleet,
        queue_length: Callable[[str], int],
        effects: list[Effect],
    ) -> None:
        """Create the handler of a router with this id and this default policy, on its tables."""
        self._router_id = router_id
        self._policy = policy
        self._fleet = fleet
        self._queue_length = queue_length  # of a model
        self._effects = effects

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
        policy = live.case.policy if live.case is not None else ""
        record = decision(
            self._router_id,
            live,
            kind,
            reason,
            placement.policy if placement is not None else policy or self._policy,
            now_ms,
            queue_length=self._queue_length(live.request.model),
            session=session,
            placement=placement,
            looked_at=looked_at,
        )
        self._effects.append(Decide(record, live.partition))

    def charge(
        self, live: LiveRequest, worker: Worker, tokens: int, begins_ms: int, now_ms: int
    ) -> None:
        """Spend one of a worker's credits on a request whose answer should begin at `begins_ms`."""
        assert worker.role not in live.attempt.charges, f"{live.request_id}: charged twice"
        request, answer = live.request, None
        if worker.role in DECODERS:
            answer = ActiveAnswer(
                live.request_id,
                prompt_tokens=live.prompt_tokens,
                max_tokens=request.sampling.max_tokens - live.prior.tokens,
                deadline_ms=request.deadline_ms,
                begins_ms=begins_ms,
            )
        self._fleet.add_request(worker, tokens, answer, adapter=request.adapter, now_ms=now_ms)
        live.attempt.charges[worker.role] = Charge(worker.life, tokens)

    def refund(self, live: LiveRequest, life: Life | None = None) -> None:
        """Give back a request's credits: all, or those of one worker incarnation."""
        for role, charge in list(live.attempt.charges.items()):
            if life is None or charge.life == life:
                del live.attempt.charges[role]
                self._fleet.release(charge.life, role, charge.tokens, live.request_id)

    def dispatch(self, live: LiveRequest, now_ms: int, kv: KvHandle | None = None) -> None:
        """Send the work that the attempt's state needs. Workers ignore repeated work."""
        prefill, decode = (
            self.charged_worker(live, Role.PREFILL),
            self.charged_worker(live, *DECODERS),
        )
        state = live.state
        if state is State.DECODING and decode is not None:
            self._send(live, decode, now_ms, kv=live.attempt.kv)
        elif state is State.PREFILLING and prefill is not None:
            self._send(live, prefill, now_ms, kv=kv)
        elif state is State.ALLOCATING and prefill is not None:
            self._send_waiting(live, decode, prefill, now_ms)
        elif state is State.PAIRED and prefill is not None and decode is not None:
            target = live.attempt.kv
            if live.attempt.orchestration is Orchestration.CONCURRENT:
                target = _peer_handle(live, decode, 0)
                self._send_waiting(live, decode, prefill, now_ms)
            self._send(live, prefill, now_ms, kv_target=target)
        live.attempt.kv = None  # used once

    def dispatch_again(self, live: LiveRequest, now_ms: int) -> None:
        """Send the work that the last router may have decided and not sent, after a takeover.

        A hand-over without its prefill's report, and KV that was received, show that it was sent.
        """
        lives = [self._fleet.worker(c.life[0], role) for role, c in live.attempt.charges.items()]
        if live.attempt.kv_received or not all(w is not None and w.is_alive(now_ms) for w in lives):
            return
        if (
            live.state is State.DECODING
            and live.attempt.mode is Mode.REMOTE
            and live.attempt.kv is None
        ):
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
            if role in live.attempt.charges:
                return self._fleet.worker(live.attempt.charges[role].life[0], role)
        return None

    def void(self, live: LiveRequest, now_ms: int) -> None:
        """Have all workers of the attempt drop it, and give back all its credits."""
        for role, charge in live.working.items():
            self._cancel(live, charge.life, role, now_ms, void=True)
        if live.keeps_kv:
            self.void_prefill(live, now_ms)
        if live.attempt.handed_unheard:  # the last router may have sent it to the placed worker
            for role in DECODERS:
                self._cancel(live, live.attempt.decode, role, now_ms, void=True)
        self.refund(live)

    def void_again(self, live: LiveRequest, now_ms: int, *, except_worker: str = "") -> None:
        """Have workers drop an attempt that the last router voided, perhaps without sending that.

        `except_worker` is one that has ended the request and needs no cancellation.
        """
        for life, role in (
            (live.attempt.prefill, Role.PREFILL),
            *((live.attempt.decode, r) for r in DECODERS),
        ):
            if life[0] != except_worker:
                self._cancel(live, life, role, now_ms, void=True)

    def void_prefill(self, live: LiveRequest, now_ms: int) -> None:
        """Have the prefill worker free the KV that it keeps."""
        self._cancel(live, live.attempt.prefill, Role.PREFILL, now_ms, void=True)

    def stop(self, live: LiveRequest, now_ms: int) -> None:
        """Have the last holder end the request with an outcome, and the others drop it."""
        ender = live.holders[-1]
        for role, charge in live.working.items():
            self._cancel(live, charge.life, role, now_ms, void=charge.life != ender)
        for charge in list(live.attempt.charges.values()):
            if charge.life != ender:
                self.refund(live, charge.life)
        # The worker that ends it frees that KV too.
        if live.keeps_kv and live.attempt.prefill != ender:
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
        attempt=live.attempt.number,
        router_id=router_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        phase=WorkPhase.PREFILL if worker.role is Role.PREFILL else WorkPhase.DECODE,
        mode=live.attempt.mode,
        orchestration=live.attempt.orchestration,
        model=request.model,
        adapter=request.adapter,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        arrived_ms=request.arrived_ms,
        deadline_ms=request.deadline_ms,
        gateway_partition=request.gateway_partition,
        prefill_worker=live.attempt.prefill[0],
        first_token_ms=live.attempt.first_token_ms,
        first_seq=live.prior.tokens if paired else live.attempt.sent_tokens,
        first_char=live.prior.chars if paired else live.attempt.sent_chars,
        cached_tokens=live.attempt.cached_tokens,
        kv=kv,
        dispatched_ms=now_ms,
        kv_target=kv_target,
        probes=None
        if worker.role is Role.PREFILL
        else probes_of(request, live.passages.passage_ids, live.passages.probed),
        prior_tokens=live.prior.tokens,
        prior_chars=live.prior.chars,
        cache_scope=request.cache_scope,
        parsing=request.parsing,
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
        engine_request_id=f"{live.request_id}.{live.attempt.number}",
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
        attempt=live.attempt.number,
        worker_id=worker.worker_id,
        at_ms=now_ms,
        void=void,
    )
    return Dispatch(worker.topic, worker.partition, record)


def decision(
    router_id: str,
    live: LiveRequest,
    kind: DecisionKind,
    reason: Reason,
    policy: str,
    now_ms: int,
    *,
    queue_length: int,
    session: Session | None = None,
    placement: Placement | None = None,
    looked_at: Sequence[Candidate] = (),
) -> Decision:
    """Return the record of a decision, from the request's live state after the decision."""
    request = live.request
    missed = ALL_MET if placement is None else placement.unmet_wishes
    return Decision(
        request_id=request.request_id,
        session_id=request.session_id,
        attempt=live.attempt.number,
        router_id=router_id,
        at_ms=now_ms,
        kind=kind,
        policy=policy,
        reason=reason,
        mode=live.attempt.mode,
        orchestration=live.attempt.orchestration,
        prefill_worker=live.attempt.prefill[0],
        prefill_epoch=live.attempt.prefill[1],
        decode_worker=live.attempt.decode[0],
        decode_epoch=live.attempt.decode[1],
        queue_length=queue_length,
        waited_ms=max(0, now_ms - live.queued_ms),
        slack_ms=request.deadline_ms - now_ms,
        prompt_tokens=live.prompt_tokens,
        session_tokens=0 if session is None else session.context_tokens,
        candidates=looked_at,
        w_ttft=0.0 if placement is None else placement.w_ttft,
        w_tpot=0.0 if placement is None else placement.w_tpot,
        load=0.0 if placement is None else placement.load,
        estimate=None if placement is None else placement.estimate,
        wished_policy=missed.policy,
        wished_orchestration=missed.orchestration,
        unmet=missed.unmet,
        policy_reason=Reason.UNKNOWN if placement is None else placement.policy_reason,
    )


def outcome_of(
    router_id: str, live: LiveRequest, kind: OutcomeKind, error: WireError | None, now_ms: int
) -> Outcome:
    """Return the outcome of a request that no worker ends. Its attempt number is above those of all
    attempts that a worker may still end."""
    return Outcome(
        request_id=live.request_id,
        session_id=live.request.session_id,
        attempt=live.next_attempt,
        kind=kind,
        error=None if error is None else replace(error, message=clip_message(error.message)),
        written_by=router_id,
        mode=live.attempt.mode,
        prefill_worker=live.attempt.prefill[0],
        decode_worker=live.attempt.decode[0],
        prompt_tokens=live.prompt_tokens - live.prior.tokens,
        completion_tokens=live.attempt.sent_tokens,
        cached_tokens=min(live.attempt.cached_tokens, live.prompt_tokens - live.prior.tokens),
        arrived_ms=live.request.arrived_ms,
        first_token_ms=live.attempt.first_token_ms,
        ended_ms=now_ms,
        orchestration=live.attempt.orchestration,
    )


def as_read(outcome: Outcome, end: StreamEnd) -> Outcome:
    """Return the outcome with the counts of `end`, for an answer that its readers have whole."""
    return replace(
        outcome,
        finish_reason=end.finish_reason,
        mode=end.mode,
        prefill_worker=end.prefill_worker,
        decode_worker=end.decode_worker,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.seq,
        cached_tokens=end.cached_tokens,
        kv_bytes=end.kv_bytes,
        probes=end.probes,
        retrieved_tokens=end.retrieved_tokens,
        stalled_ms=end.stalled_ms,
        first_token_ms=end.first_token_ms or outcome.first_token_ms,  # 0: older worker
        worker_ms=end.worker_ms,
        reasoning_tokens=end.reasoning_tokens,
    )
