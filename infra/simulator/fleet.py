"""What simulated workers and their router tell the fleet: registrations, heartbeats, KV events."""

from infra.simulator.latency import Setup
from infra.simulator.worker import SimWorker
from schemas import prefix
from schemas.records import (
    Capability,
    Grant,
    Heartbeat,
    KvEvents,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Orchestration,
    Registration,
    Role,
)
from schemas.topics import WORK_TOPICS

MODEL = "simulated"
FleetRecord = Registration | Heartbeat


def registration(worker: SimWorker, orchestrations: tuple[Orchestration, ...]) -> Registration:
    """A worker introduces this life of itself."""
    setup = worker.setup
    topics = sorted({WORK_TOPICS[role] for role in worker.roles})
    capability = Capability(
        model=MODEL,
        engine="sim",
        engine_id=worker.worker_id,
        block_size=setup.block_tokens,
        max_model_len=setup.kv_blocks * setup.block_tokens,
        running_max=setup.running_max,
        orchestrations=orchestrations,
        kv_bytes_per_token=setup.model.kv_bytes_per_token,
    )
    return Registration(
        member_id=worker.worker_id,
        epoch=worker.epoch,
        kind=MemberKind.WORKER,
        roles=worker.roles,
        leases=[Lease(topic=topic, partition=worker.partition) for topic in topics],
        started_ms=int(worker.clock.now_ms),
        capability=capability,
    )


def heartbeat(worker: SimWorker, seq: int, router_id: str) -> Heartbeat:
    """A worker lives, grants credits and tells its load."""
    engine, cache = worker.engine, worker.cache
    grants = [
        Grant(router_id=router_id, role=role, credits=credits_of(worker.setup, role))
        for role in worker.roles
    ]
    load = Load(
        running=engine.batch,
        waiting=len(worker.jobs) - engine.batch,
        queued_tokens=engine.queued_tokens + sum(job.prompt_tokens for job in worker.pending),
        step_ms=engine.step_ms,
        kv_blocks_used=cache.pinned,
        kv_blocks_total=cache.blocks_max,
        requests_total=worker.requests_total,
        tokens_total=worker.tokens_total,
    )
    return Heartbeat(
        member_id=worker.worker_id,
        epoch=worker.epoch,
        seq=seq,
        at_ms=int(worker.clock.now_ms),
        state=MemberState.READY,
        grants=grants,
        load=load,
    )


def credits_of(setup: Setup, role: Role) -> int:
    """How much work of a role a worker takes at once."""
    return setup.prefill_credits if role is Role.PREFILL else setup.running_max


def kv_events(worker: SimWorker, seq: int) -> KvEvents:
    """What changed in a worker's prefix cache; its life's first batch is a snapshot."""
    removed, stored = worker.cache.take()
    return KvEvents(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        seq=seq,
        at_ms=int(worker.clock.now_ms),
        block_size=worker.setup.block_tokens,
        snapshot=seq == 0,
        stored=prefix.pack(stored),
        removed=prefix.pack(removed),
    )


def router_registration(router_id: str) -> Registration:
    """The router is a member as well."""
    return Registration(member_id=router_id, epoch=1, kind=MemberKind.ROUTER, started_ms=0)


def router_heartbeat(router_id: str, seq: int, now_ms: float) -> Heartbeat:
    """And beats."""
    return Heartbeat(
        member_id=router_id,
        epoch=1,
        seq=seq,
        at_ms=int(now_ms),
        state=MemberState.READY,
        load=Load(),
    )
