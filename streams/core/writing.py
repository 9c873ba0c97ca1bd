"""The records that a router writes about a request, built from its live state. Pure functions;
nothing is decided here.
"""

from collections.abc import Sequence

from schemas.records import (
    CancelWork,
    Candidate,
    Decision,
    DecisionKind,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    Reason,
    Session,
    WireError,
    Work,
    WorkPhase,
)
from streams.core.effects import Dispatch
from streams.core.fleet import Worker
from streams.core.requests import Live


def work(router_id: str, live: Live, worker: Worker, phase: WorkPhase, now_ms: int) -> Dispatch:
    """The work of the live state's current attempt for one worker."""
    request = live.request
    remote = live.mode is Mode.REMOTE
    record = Work(
        request_id=request.request_id,
        session_id=request.session_id,
        attempt=live.attempt,
        router_id=router_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        phase=phase,
        mode=live.mode,
        orchestration=Orchestration.PREFILL_FIRST if remote else Orchestration.NONE,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        arrived_ms=request.arrived_ms,
        deadline_ms=request.deadline_ms,
        gateway_partition=request.gateway_partition,
        prefill_worker=live.prefill[0],
        first_token_ms=live.first_token_ms,
        first_seq=live.sent_tokens,
        first_char=live.sent_chars,
        cached_tokens=live.cached_tokens,
        kv=live.kv,
        dispatched_ms=now_ms,
    )
    return Dispatch(worker.topic, worker.partition, record)


def cancel_work(live: Live, worker: Worker, now_ms: int) -> Dispatch:
    """Stop this attempt and all lower ones on one worker, and free what they hold there."""
    record = CancelWork(
        request_id=live.request_id,
        attempt=live.attempt,
        worker_id=worker.worker_id,
        at_ms=now_ms,
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
    looked_at: Sequence[Candidate] = (),
) -> Decision:
    """What was decided about a request, from its live state as it is after the decision."""
    request = live.request
    remote = live.mode is Mode.REMOTE
    return Decision(
        request_id=request.request_id,
        session_id=request.session_id,
        attempt=live.attempt,
        router_id=router_id,
        at_ms=now_ms,
        kind=kind,
        policy=policy,
        reason=reason,
        mode=live.mode,
        orchestration=Orchestration.PREFILL_FIRST if remote else Orchestration.NONE,
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
    )


def outcome(
    router_id: str, live: Live, kind: OutcomeKind, error: WireError | None, now_ms: int
) -> Outcome:
    """The end of a request that no worker ends."""
    return Outcome(
        request_id=live.request_id,
        session_id=live.request.session_id,
        attempt=live.attempt,
        kind=kind,
        error=error,
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
    )
