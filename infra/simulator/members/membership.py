"""The members of a simulated cluster on the fleet topics: they join, send heartbeats and leave.

Workers also publish the changes of their prefix caches.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from infra.simulator.log.clock import Clock
from infra.simulator.members.gateways import Gateways, SimGateway
from infra.simulator.members.router import ROUTER, SimRouter
from infra.simulator.members.worker import SimWorker
from infra.simulator.members.worker_process import SimProcess
from schemas import prefix
from schemas.fleet import HEARTBEAT_MS, FleetView
from schemas.records import (
    AssignRoles,
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
from streams.core.events import FleetRecordArrived, KvEventsArrived
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
    member_id: str, epoch: int, seq: int, now_ms: float, backlogs: tuple[Backlog, ...] = ()
) -> Heartbeat:
    """Return the heartbeat of a router or a gateway."""
    return Heartbeat(
        member_id=member_id,
        epoch=epoch,
        seq=seq,
        at_ms=int(now_ms),
        state=MemberState.READY,
        load=Load(),
        backlogs=backlogs,
    )


KV_EVENTS_MS = 100.0  # between two records of a worker
Send = Callable[[str, object, Callable[[int], None]], None]  # topic, record, deliver(offset)


class PeerView:
    """A worker's view of other workers, as `workers/presence.py` gives it."""

    def __init__(self, view: FleetView, worker_id: str) -> None:
        self._view, self._worker_id = view, worker_id

    def epoch_of(self, worker_id: str) -> int:
        """Return the latest epoch of a worker; 0 if it is unknown."""
        member = self._view.members.get(worker_id)
        return 0 if member is None else member.epoch

    def clock_offset_ms(self, worker_id: str) -> int:
        """Return the difference between another worker's clock and this one's."""
        return self._view.apart_ms(worker_id, self._worker_id)


class SimMembership:
    """All members of a cluster; they share `view`, each one's view of the fleet."""

    def __init__(
        self,
        clock: Clock,
        router: SimRouter,
        gateways: Gateways,
        orchestrations: tuple[Orchestration, ...],
        send: Send,
    ) -> None:
        self.workers: dict[str, SimWorker] = {}
        self.view = FleetView()
        self._clock, self._router, self._gateways = clock, router, gateways
        self._orchestrations, self._send = orchestrations, send
        self.recent_beats: defaultdict[str, deque[Heartbeat]] = defaultdict(lambda: deque(maxlen=8))
        self._beats = 0
        self._kv_seqs: dict[str, int] = {}
        self._kv_due: set[str] = set()

    def peer_view_of(self, worker_id: str) -> "PeerView":
        """Return a worker's view of other workers."""
        return PeerView(self.view, worker_id)

    def join(self, worker: SimWorker) -> None:
        """Register a worker in a new epoch, and publish a snapshot of its cache."""
        self._write(registration(worker, self._orchestrations))
        self._kv_seqs[worker.worker_id] = 0
        self._tell_blocks(worker, snapshot=True)

    def join_gateway(self, gateway: SimGateway) -> None:
        """Register a gateway in its present epoch."""
        kind, started_ms = MemberKind.GATEWAY, gateway.started_ms
        self._write(member_registration(gateway.gateway_id, gateway.epoch, kind, started_ms))

    def join_router(self) -> None:
        """Register the router; all workers publish snapshots of their caches for it."""
        self._write(member_registration(ROUTER, self._router.epoch, MemberKind.ROUTER, 0))
        for worker in self.workers.values():
            self._tell_blocks(worker, snapshot=True)

    def assign(self, worker: SimWorker, order: AssignRoles) -> None:
        """Give a worker other roles in the same epoch; a worker of another epoch ignores the
        order."""
        if worker.alive and worker.epoch == order.worker_epoch:
            worker.assign(tuple(order.roles))
            self._write(registration(worker, self._orchestrations))

    def leave(self, worker: SimWorker) -> None:
        """Let a worker return its requests and leave the fleet."""
        worker.process.leave()
        self._beats += 1
        self._write(heartbeat(worker, self._beats))

    def beat(self) -> None:
        """Send the heartbeats of all live members, every `HEARTBEAT_MS`."""
        self._beats += 1
        now_ms = self._clock.now_ms
        if self._router.alive and not self._router.is_asleep:
            backlogs = self._router.core.backlogs(int(now_ms))
            self._write(member_heartbeat(ROUTER, self._router.epoch, self._beats, now_ms, backlogs))
        for gateway in self._gateways.living:
            self._write(member_heartbeat(gateway.gateway_id, gateway.epoch, self._beats, now_ms))
        for worker in self.workers.values():
            if not worker.is_silent:
                worker.beat_ms = now_ms
                beat = heartbeat(worker, self._beats)
                self.recent_beats[worker.worker_id].append(beat)
                self._write(beat)
        self._clock.after(HEARTBEAT_MS, self.beat)

    def _write(self, record: FleetRecord) -> None:
        def deliver(offset: int) -> None:
            now_ms, name = int(self._clock.now_ms), record.member_id
            if not self.view.apply(record, offset, now_ms, logged_ms=now_ms):
                self._fenced(name, record.epoch)
                return
            member = self.view.members.get(name)
            is_its = member is not None and member.epoch == record.epoch
            ahead_ms = member.ahead_ms if member is not None and is_its else 0
            self._router.apply(FleetRecordArrived(record, offset, ahead_ms))

        self._send("fleet", record, deliver)

    def _fenced(self, member_id: str, epoch: int) -> None:
        """Let a member join again in a new epoch: it read in the log that its lease had ended."""
        gateway = self._gateways.by_id.get(member_id)
        if gateway is not None and gateway.alive and gateway.epoch == epoch:
            gateway.epoch += 1
            self.join_gateway(gateway)
        worker = self.workers.get(member_id)
        if worker is not None and worker.alive and worker.epoch == epoch:
            self.rejoin(worker)

    def rejoin(self, worker: SimWorker) -> None:
        """End a worker's epoch without a last heartbeat, and begin the next one at once."""
        worker.crash()
        worker.restart()
        self.join(worker)

    def blocks_changed(self, worker_id: str) -> None:
        """Publish the changes of a worker's cache, at most once every `KV_EVENTS_MS`."""
        if worker_id not in self._kv_due:
            self._kv_due.add(worker_id)
            self._clock.after(KV_EVENTS_MS, lambda: self._tell_blocks(self.workers[worker_id]))

    def _tell_blocks(self, worker: SimWorker, *, snapshot: bool = False) -> None:
        self._kv_due.discard(worker.worker_id)
        if not worker.alive:
            return
        seq = self._kv_seqs[worker.worker_id]
        self._kv_seqs[worker.worker_id] = seq + 1
        record: KvEvents = kv_events(worker, seq, snapshot=snapshot)
        self._send(
            "prefixes", record, lambda offset: self._router.apply(KvEventsArrived(record, offset))
        )
