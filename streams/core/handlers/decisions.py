"""The records that a router writes about a request, built from its live state. Pure functions;
nothing is decided here.
"""

from collections.abc import Sequence
from dataclasses import replace

from schemas.errors import clipped
from schemas.frozen import maker
from schemas.records import (
    CancelWork,
    Candidate,
    Decision,
    DecisionKind,
    KvHandle,
    Outcome,
    OutcomeKind,
    Reason,
    Role,
    Session,
    WireError,
    Work,
    WorkPhase,
)
from streams.core.effects import Dispatch
from streams.core.fleet.members import Worker
from streams.core.placement.placer import Placement
from streams.core.placement.wishes import ALL_MET
from streams.core.requests.live import Live

_decision, _work = maker(Decision), maker(Work)  # one of each per placement
# Looked up once: naming a member of an enumeration costs more than comparing with it.
_PREFILL_ROLE, _PREFILL, _DECODE = Role.PREFILL, WorkPhase.PREFILL, WorkPhase.DECODE


def work(
    router_id: str,
    live: Live,
    worker: Worker,
    now_ms: int,
    *,
    kv: KvHandle | None = None,
    kv_target: KvHandle | None = None,
) -> Dispatch:
    """The work of the live state's current attempt for one worker, by the worker's role.

    Decode of a pair sends its tokens from the first one on, so that no death leaves a gap.
    """
    request, paired = live.request, live.is_paired
    record = _work(
        request_id=request.request_id,
        session_id=request.session_id,
        attempt=live.attempt,
        router_id=router_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        phase=_PREFILL if worker.role is _PREFILL_ROLE else _DECODE,
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
        first_seq=0 if paired else live.sent_tokens,
        first_char=0 if paired else live.sent_chars,
        cached_tokens=live.cached_tokens,
        kv=kv,
        dispatched_ms=now_ms,
        kv_target=kv_target,
    )
    return Dispatch(worker.topic, worker.partition, record)


def promised(live: Live, peer: Worker, tokens: int) -> KvHandle:
    """The other side of a pair, as a handle without blocks: the engines name those themselves."""
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


def cancel_work(live: Live, worker: Worker, now_ms: int, *, void: bool) -> Dispatch:
    """Stop this attempt and all lower ones on one worker, and free what they hold there.

    Void: the worker says nothing more of it; otherwise it ends the request with an outcome.
    """
    record = CancelWork(
        request_id=live.request_id,
        attempt=live.attempt,
        worker_id=worker.worker_id,
        at_ms=now_ms,
        void=void,
    )
    return Dispatch(worker.topic, worker.partition, record)


def decision(
    router_id: str,
    live: Live,
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
    """What was decided about a request, from its live state as it is after the decision."""
    request = live.request
    missed = ALL_MET if placement is None else placement.missed
    return _decision(
        request_id=request.request_id,
        session_id=request.session_id,
        attempt=live.attempt,
        router_id=router_id,
        at_ms=now_ms,
        kind=kind,
        policy=policy,
        reason=reason,
        mode=live.mode,
        orchestration=live.orchestration,
        prefill_worker=live.prefill[0],
        prefill_epoch=live.prefill[1],
        decode_worker=live.decode[0],
        decode_epoch=live.decode[1],
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


def outcome(
    router_id: str, live: Live, kind: OutcomeKind, error: WireError | None, now_ms: int
) -> Outcome:
    """The end of a request that no worker ends: an attempt of its own, above all that a worker may
    still end."""
    return Outcome(
        request_id=live.request_id,
        session_id=live.request.session_id,
        attempt=live.next_attempt,
        kind=kind,
        error=None if error is None else replace(error, message=clipped(error.message)),
        written_by=router_id,
        mode=live.mode,
        prefill_worker=live.prefill[0],
        decode_worker=live.decode[0],
        prompt_tokens=live.prompt_tokens,
        completion_tokens=live.sent_tokens,
        cached_tokens=live.cached_tokens,
        arrived_ms=live.request.arrived_ms,
        first_token_ms=live.first_token_ms,
        ended_ms=now_ms,
        orchestration=live.orchestration,
    )
