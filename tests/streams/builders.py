"""Builders of records with every field defaulted: what a test writes is what it is about."""

from dataclasses import replace
from typing import Any

from schemas.records import (
    Cancellation,
    CancelReason,
    Capability,
    Continued,
    Endpoint,
    Grant,
    Heartbeat,
    KvHandle,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Orchestration,
    Outcome,
    OutcomeKind,
    Passage,
    Phase,
    PhaseKind,
    Priority,
    Probing,
    Registration,
    Request,
    Resumption,
    Retrieval,
    Retrieved,
    Role,
    Sampling,
    WireError,
    Work,
)
from schemas.rules.tokens import pack_tokens, token_count

ROUTER = "router-a"
T0 = 1_000_000
ALL = (Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)
_LEASED = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.REPLICA: "decode"}


def request(request_id: str = "r1", tokens: int = 10, **changes: Any) -> Request:
    """A standard chat request that arrives at T0 and has a minute."""
    base = Request(
        request_id=request_id,
        parent_id=request_id,
        session_id="s-" + request_id,
        endpoint=Endpoint.CHAT,
        priority=Priority.STANDARD,
        model="tiny",
        prompt_tokens=pack_tokens(range(tokens)),
        sampling=Sampling(max_tokens=16, seed=7),
        arrived_ms=T0,
        deadline_ms=T0 + 60_000,
        gateway_id="gateway-a",
        gateway_partition=0,
    )
    return replace(base, **changes)


def retrieval(by_ms: int = T0 + 500, **changes: Any) -> Retrieval:
    """Two passages at most, before token 4; a tail before token 8."""
    base = Retrieval(
        collection="handbook",
        query="when does the ferry leave",
        k=2,
        by_ms=by_ms,
        tokens_max=40,
        at=4,
        lead=pack_tokens([901]),
        joint=pack_tokens([902]),
        trail=pack_tokens([903]),
        tail_at=8,
        tail=pack_tokens([904, 905]),
    )
    return replace(base, **changes)


def probing(**changes: Any) -> Probing:
    """A probe before every eighth token of the answer, with room for all that is found."""
    return replace(Probing(every=8, lookahead=2, tokens_max=200), **changes)


def passage(number: int, tokens: int = 3, **changes: Any) -> Passage:
    """Its tokens are NUMBER0, NUMBER1, ..."""
    base = Passage(
        passage_id=f"d{number}#0",
        document_id=f"d{number}",
        text=f"text {number}",
        tokens=pack_tokens([1_000 * number + index for index in range(tokens)]),
        title=f"title {number}",
        source=f"{number}.md",
        score=1.0 / number,
    )
    return replace(base, **changes)


def retrieved(request_id: str, *passages: Passage, **changes: Any) -> Retrieved:
    """What a router found for a request."""
    base = Retrieved(
        request_id=request_id,
        session_id="s-" + request_id,
        router_id=ROUTER,
        passages=passages,
        shards=1,
        asked_ms=T0,
        at_ms=T0,
    )
    return replace(base, **changes)


def continued(request_id: str, attempt: int, **changes: Any) -> Continued:
    """How much there is of an answer, as its gateway tells it."""
    base = Continued(
        request_id=request_id,
        session_id="s-" + request_id,
        attempt=attempt,
        written_by="gateway-a",
        at_ms=T0,
    )
    return replace(base, **changes)


def cancellation(request_id: str, **changes: Any) -> Cancellation:
    """The client gives a request up."""
    base = Cancellation(
        request_id=request_id,
        session_id="s-" + request_id,
        reason=CancelReason.CLIENT_REQUEST,
        at_ms=T0,
    )
    return replace(base, **changes)


def resumption(
    request_id: str, gateway_id: str, gateway_started_ms: int, **changes: Any
) -> Resumption:
    """The client goes on reading at another gateway."""
    base = Resumption(
        request_id=request_id,
        session_id="s-" + request_id,
        gateway_id=gateway_id,
        gateway_started_ms=gateway_started_ms,
        at_ms=T0,
    )
    return replace(base, **changes)


def registration(
    worker_id: str, *roles: Role, epoch: int = 1, partition: int = 0, **changes: Any
) -> Registration:
    """A worker that leases one partition per topic."""
    topics = sorted({_LEASED[role] for role in roles})
    base = Registration(
        member_id=worker_id,
        epoch=epoch,
        kind=MemberKind.WORKER,
        roles=roles,
        leases=[Lease(topic=topic, partition=partition) for topic in topics],
        started_ms=T0,
        capability=capability(worker_id, block_size=1) if roles else None,
    )
    return replace(base, **changes)


def capability(
    worker_id: str,
    *orchestrations: Orchestration,
    block_size: int = 16,
    model: str = "tiny",
    **changes: Any,
) -> Capability:
    """A small simulated engine."""
    return Capability(
        model=model,
        engine="sim",
        engine_id=f"engine-{worker_id}",
        block_size=block_size,
        max_model_len=4_096,
        running_max=8,
        orchestrations=orchestrations,
        **changes,
    )


def beat(
    member_id: str,
    seq: int,
    credits: dict[Role, int] | None = None,
    *,
    epoch: int = 1,
    router_id: str = ROUTER,
    **changes: Any,
) -> Heartbeat:
    """A ready member's heartbeat that grants one router credits."""
    grants = [Grant(router_id=router_id, role=r, credits=c) for r, c in (credits or {}).items()]
    base = Heartbeat(
        member_id=member_id,
        epoch=epoch,
        seq=seq,
        at_ms=T0,
        state=MemberState.READY,
        grants=grants,
        load=Load(),
    )
    return replace(base, **changes)


def handle(work: Work, expires_at_ms: int) -> KvHandle:
    """The KV that a prefill worker holds."""
    return KvHandle(
        worker_id=work.worker_id,
        worker_epoch=work.worker_epoch,
        engine_id="engine",
        engine_request_id=work.request_id,
        tokens=token_count(work.prompt_tokens),
        block_size=16,
        block_ids=(1, 2),
        expires_at_ms=expires_at_ms,
    )


def phase(work: Work, kind: PhaseKind, now_ms: int = T0, **changes: Any) -> Phase:
    """What the worker that took `work` reports."""
    base = Phase(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        router_id=work.router_id,
        worker_id=work.worker_id,
        worker_epoch=work.worker_epoch,
        kind=kind,
        started_ms=now_ms - 7,
        ended_ms=now_ms,
    )
    if kind is PhaseKind.PREFILL_DONE:
        paired = work.orchestration is not Orchestration.PREFILL_FIRST
        kv = None if paired else handle(work, now_ms + 30_000)
        base = replace(base, kv=kv, sent_tokens=1, sent_chars=3, kv_bytes=64 if paired else 0)
    if kind is PhaseKind.KV_ALLOCATED:
        base = replace(base, kv=replace(handle(work, work.deadline_ms), tokens=0))
    if kind in (PhaseKind.FAILED, PhaseKind.REFUSED):
        error = WireError(code="engine_failed", message="it broke", retriable=True)
        base = replace(base, error=error)
    return replace(base, **changes)


def outcome(work: Work, now_ms: int = T0, **changes: Any) -> Outcome:
    """The worker that took `work` completed the answer."""
    base = Outcome(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        kind=OutcomeKind.COMPLETED,
        finish_reason="length",
        written_by=work.worker_id,
        mode=work.mode,
        prefill_worker=work.prefill_worker,
        decode_worker=work.worker_id,
        prompt_tokens=token_count(work.prompt_tokens),
        completion_tokens=16,
        ended_ms=now_ms,
        orchestration=work.orchestration,
    )
    return replace(base, **changes)
