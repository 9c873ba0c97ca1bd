"""Members of a simulated cluster on the fleet's topics: they join, beat, tell their KV, leave."""

from collections import defaultdict, deque
from collections.abc import Callable

from infra.simulator.log.clock import Clock
from infra.simulator.members import fleet
from infra.simulator.members.gateways import Gateways, SimGateway
from infra.simulator.members.router import ROUTER, SimRouter
from infra.simulator.members.worker import SimWorker
from schemas.fleet import HEARTBEAT_MS, FleetView
from schemas.records import AssignRoles, Heartbeat, KvEvents, MemberKind, Orchestration
from streams.core.events import FleetRecordArrived, KvEventsArrived

KV_EVENTS_MS = 100.0  # between two batches of a worker
Send = Callable[[str, object, Callable[[int], None]], None]  # topic, record, deliver from an offset


class PeerView:
    """What a worker knows of others, as `workers/presence.py` tells it."""

    def __init__(self, view: FleetView, worker_id: str) -> None:
        self._view, self._worker_id = view, worker_id

    def epoch_of(self, worker_id: str) -> int:
        """Return the latest epoch of a worker, 0 where none is known."""
        member = self._view.members.get(worker_id)
        return 0 if member is None else member.epoch

    def clock_offset_ms(self, worker_id: str) -> int:
        """By how much its clock differs."""
        return self._view.apart_ms(worker_id, self._worker_id)


class SimMembership:
    """All members; `view` is what each of them sees of the others, which workers ask it."""

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
        self.unheard_workers: set[str] = set()  # workers of which no heartbeat gets through

    def peer_view_of(self, worker_id: str) -> "PeerView":
        """What a worker knows of others."""
        return PeerView(self.view, worker_id)

    def join(self, worker: SimWorker) -> None:
        """A worker's life begins: it registers and tells what its cache holds."""
        self._write(fleet.registration(worker, self._orchestrations))
        self._kv_seqs[worker.worker_id] = 0
        self._tell_blocks(worker, snapshot=True)

    def join_gateway(self, gateway: SimGateway) -> None:
        """A gateway joins, in this process or epoch."""
        kind, started_ms = MemberKind.GATEWAY, gateway.started_ms
        self._write(fleet.member_registration(gateway.gateway_id, gateway.epoch, kind, started_ms))

    def join_router(self) -> None:
        """The router joins; what workers cache is told anew."""
        self._write(fleet.member_registration(ROUTER, self._router.epoch, MemberKind.ROUTER, 0))
        for worker in self.workers.values():
            self._tell_blocks(worker, snapshot=True)

    def assign(self, worker: SimWorker, order: AssignRoles) -> None:
        """A worker takes other roles, in the same life; one of another life ignores that."""
        if worker.alive and worker.epoch == order.worker_epoch:
            worker.assign(tuple(order.roles))
            self._write(fleet.registration(worker, self._orchestrations))

    def leave(self, worker: SimWorker) -> None:
        """A worker gives back what it holds, and is gone."""
        worker.process.leave()
        self._beats += 1
        self._write(fleet.heartbeat(worker, self._beats))

    def beat(self) -> None:
        """All members beat together, again and again; the dead do not."""
        self._beats += 1
        now_ms = self._clock.now_ms
        if self._router.alive and not self._router.is_asleep:
            backlog = self._router.core.backlog(int(now_ms))
            self._write(
                fleet.member_heartbeat(ROUTER, self._router.epoch, self._beats, now_ms, backlog)
            )
        for gateway in self._gateways.living:
            self._write(
                fleet.member_heartbeat(gateway.gateway_id, gateway.epoch, self._beats, now_ms)
            )
        for worker in self.workers.values():
            if not worker.is_silent and worker.worker_id not in self.unheard_workers:
                worker.beat_ms = now_ms
                beat = fleet.heartbeat(worker, self._beats)
                self.recent_beats[worker.worker_id].append(beat)
                self._write(beat)
        self._clock.after(HEARTBEAT_MS, self.beat)

    def _write(self, record: fleet.FleetRecord) -> None:
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
        """A member reads in the log that it was silent for too long, and joins again."""
        gateway = self._gateways.by_id.get(member_id)
        if gateway is not None and gateway.alive and gateway.epoch == epoch:
            gateway.epoch += 1
            self.join_gateway(gateway)
        worker = self.workers.get(member_id)
        if worker is not None and worker.alive and worker.epoch == epoch:
            self.rejoin(worker)

    def rejoin(self, worker: SimWorker) -> None:
        """A life is over, without a word of it; the next one begins at once."""
        worker.crash()
        worker.restart()
        self.join(worker)

    def blocks_changed(self, worker_id: str) -> None:
        """Publish what a worker caches, not more often than once in a while."""
        if worker_id not in self._kv_due:
            self._kv_due.add(worker_id)
            self._clock.after(KV_EVENTS_MS, lambda: self._tell_blocks(self.workers[worker_id]))

    def _tell_blocks(self, worker: SimWorker, *, snapshot: bool = False) -> None:
        self._kv_due.discard(worker.worker_id)
        if not worker.alive:
            return
        seq = self._kv_seqs[worker.worker_id]
        self._kv_seqs[worker.worker_id] = seq + 1
        record: KvEvents = fleet.kv_events(worker, seq, snapshot=snapshot)
        self._send(
            "prefixes", record, lambda offset: self._router.apply(KvEventsArrived(record, offset))
        )
