"""Builds the records of a router's decisions and outcomes from a request's live state.

Pure functions, which decide nothing; the other handlers and the router call them.
"""

from collections.abc import Sequence
from dataclasses import replace

from schemas.errors import clip_message
from schemas.records import (
    Candidate,
    Decision,
    DecisionKind,
    Outcome,
    OutcomeKind,
    Reason,
    Session,
    StreamEnd,
    WireError,
)
from streams.core.placement.answer import Placement
from streams.core.placement.case import ALL_MET
from streams.core.requests.live import LiveRequest


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
        mode=live.mode,
        prefill_worker=live.prefill[0],
        decode_worker=live.decode[0],
        prompt_tokens=live.prompt_tokens - live.prior_tokens,
        completion_tokens=live.sent_tokens,
        cached_tokens=min(live.cached_tokens, live.prompt_tokens - live.prior_tokens),
        arrived_ms=live.request.arrived_ms,
        first_token_ms=live.first_token_ms,
        ended_ms=now_ms,
        orchestration=live.orchestration,
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
    )
