"""The fleet records of simulated members: registrations, heartbeats and KV events."""

from dataclasses import replace

from infra.simulator.members.worker import SimWorker
from infra.simulator.members.worker_process import SimProcess
from schemas import prefix
from schemas.records import (
    Backlog,
    Heartbeat,
    KvEvents,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Orchestration,
    Registration,
)
from schemas.topics import WORK_TOPICS
from workers.presence import load_of

FleetRecord = Registration | Heartbeat


def registration(worker: SimWorker, orchestrations: tuple[Orchestration, ...]) -> Registration:
    """Return a worker's registration in its present epoch."""
    topics = sorted({WORK_TOPICS[role] for role in worker.roles})
    capability = replace(worker.process.engine.capability, orchestrations=orchestrations)
    return Registration(
        member_id=worker.worker_id,
        epoch=worker.epoch,
        kind=MemberKind.WORKER,
        roles=worker.roles,
        leases=tuple(Lease(topic=topic, partition=worker.partition) for topic in topics),
        started_ms=int(worker.wall.now_ms),
        capability=capability,
    )


def heartbeat(worker: SimWorker, seq: int) -> Heartbeat:
    """Return a worker's heartbeat, with its grants and load; the last one has the state GONE."""
    process = worker.process
    return Heartbeat(
        member_id=worker.worker_id,
        epoch=worker.epoch,
        seq=seq,
        at_ms=int(worker.wall.now_ms),
        state=_state(worker.process),
        grants=worker.grants,
        load=load_of(process.engine.load(), process.requests, 0.0),
    )


def _state(process: SimProcess) -> MemberState:
    if not process.alive:
        return MemberState.GONE
    return MemberState.DRAINING if process.requests.draining else MemberState.READY


def kv_events(worker: SimWorker, seq: int, *, snapshot: bool) -> KvEvents:
    """Return the changes of a worker's prefix cache, or a snapshot of it."""
    cache = worker.process.engine.state.cache
    removed, stored = cache.take()
    return KvEvents(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        seq=seq,
        at_ms=int(worker.wall.now_ms),
        block_size=worker.setup.block_tokens,
        snapshot=snapshot,
        stored=prefix.pack(cache.held_hashes() if snapshot else stored),
        removed=prefix.pack(() if snapshot else removed),
    )


def member_registration(
    member_id: str, epoch: int, kind: MemberKind, started_ms: int
) -> Registration:
    """Return the registration of a router or a gateway."""
    return Registration(member_id=member_id, epoch=epoch, kind=kind, started_ms=started_ms)


def member_heartbeat(
    member_id: str, epoch: int, seq: int, now_ms: float, backlog: Backlog | None = None
) -> Heartbeat:
    """Return the heartbeat of a router or a gateway."""
    return Heartbeat(
        member_id=member_id,
        epoch=epoch,
        seq=seq,
        at_ms=int(now_ms),
        state=MemberState.READY,
        load=Load(),
        backlog=backlog,
    )
