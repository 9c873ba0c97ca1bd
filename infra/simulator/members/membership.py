"""Members of a simulated cluster on the fleet's topics: they join, beat, tell their KV, leave."""

from collections.abc import Callable

from infra.simulator.log.clock import Clock
from infra.simulator.members import fleet
from infra.simulator.members.gateways import Gateways, SimGateway
from infra.simulator.members.router import ROUTER, SimRouter
from infra.simulator.members.worker import SimWorker
from schemas.fleet import HEARTBEAT_MS, FleetView
from schemas.records import KvEvents, MemberKind, Orchestration, Registration
from streams.core.events import FleetRecordArrived, KvEventsArrived

KV_EVENTS_MS = 100.0  # between two batches of a worker
Send = Callable[[str, object, Callable[[int], None]], None]  # topic, record, deliver from an offset


class Membership:
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
        self._beats = 0
        self._kv_seqs: dict[str, int] = {}
        self._kv_due: set[str] = set()

    def epoch_of(self, worker_id: str) -> int:
        """As workers know it."""
        member = self.view.members.get(worker_id)
        return 0 if member is None else member.epoch

    def apart_ms(self, worker_id: str) -> int:
        """All clocks are one."""
        return 0

    def join(self, worker: SimWorker) -> None:
        """A worker's life begins: it registers and tells what its cache holds."""
        self._write(fleet.registration(worker, self._orchestrations))
        self._kv_seqs[worker.worker_id] = 0
        self._tell_blocks(worker, snapshot=True)

    def join_gateway(self, gateway: SimGateway) -> None:
        """A gateway joins, in this process or epoch."""
        kind, started_ms = MemberKind.GATEWAY, gateway.started_ms
        self._write(fleet.joins(gateway.gateway_id, gateway.epoch, kind, started_ms))

    def join_router(self) -> None:
        """The router joins; what workers cache is told anew."""
        self._write(fleet.joins(ROUTER, self._router.epoch, MemberKind.ROUTER, 0))
        for worker in self.workers.values():
            self._tell_blocks(worker, snapshot=True)

    def leave(self, worker: SimWorker) -> None:
        """A worker gives back what it holds, and is gone."""
        worker.life.leave()
        self._beats += 1
        self._write(fleet.heartbeat(worker, self._beats))

    def beat(self) -> None:
        """All members beat together, again and again; the dead do not."""
        self._beats += 1
        now_ms = self._clock.now_ms
        if self._router.alive:
            self._write(fleet.lives(ROUTER, self._router.epoch, self._beats, now_ms))
        for gateway in self._gateways.living:
            self._write(fleet.lives(gateway.gateway_id, gateway.epoch, self._beats, now_ms))
        for worker in self.workers.values():
            if worker.alive:
                self._write(fleet.heartbeat(worker, self._beats))
        self._clock.after(HEARTBEAT_MS, self.beat)

    def _write(self, record: fleet.FleetRecord) -> None:
        def deliver(offset: int) -> None:
            if isinstance(record, Registration):  # nobody asks when others were last heard of
                self.view.apply(record, offset, int(self._clock.now_ms))
            self._router.apply(FleetRecordArrived(record, offset))

        self._send("fleet", record, deliver)

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
