"""A simulated worker: one `SimProcess` after the other under a worker id."""

from collections.abc import Callable

from infra.simulator.log.clock import Clock, ProcessClock, WallClock
from infra.simulator.machine.engine import Hashes, TimedEngine
from infra.simulator.machine.gpu import SimGpu
from infra.simulator.machine.kv_exchange import SimKvExchange
from infra.simulator.members.router import ROUTER
from infra.simulator.members.worker_process import Ports, SimProcess
from infra.simulator.models import Served
from schemas.records import Role, Work
from schemas.settings import LogSettings
from workers import credits
from workers.llm.active_requests import SEEN_MAX, RequestLimits
from workers.llm.stream import Peers, WorkerIdentity


def _ignore_work(work: Work) -> None:
    """Do nothing about a piece of work."""


class SimWorker:
    """A worker; `process` is the present process, or the last one."""

    def __init__(
        self,
        worker_id: str,
        roles: tuple[Role, ...],
        partition: int,
        clock: Clock,
        exchange: SimKvExchange,
        hashes: Hashes,
        peer_view: Peers,
        ports: Ports,
        make_gpu: Callable[..., SimGpu] = SimGpu,
        served: Served = Served(),  # noqa: B008  # never changed
    ) -> None:
        self.worker_id, self.roles, self.partition = worker_id, roles, partition
        self.clock, self.setup = ProcessClock(clock), exchange.setup
        self.wall = WallClock(self.clock)
        self.is_mute = False  # its heartbeats are lost
        self.on_work: Callable[[Work], None] = _ignore_work  # set by faults
        self.beat_ms = 0.0  # when the last heartbeat that was not lost was sent
        self.epoch = 0
        self.served = served  # of the present process and later ones
        self._exchange, self._hashes = exchange, hashes
        self._peer_view, self._ports, self._make_gpu = peer_view, ports, make_gpu
        self._offer()
        self.restart()

    def _offer(self) -> None:
        """Set the credits of each role from the setup."""
        prefill = self.setup.prefill_credits
        rest = self.setup.decode_credits or self.setup.running_max
        self.capacities = {role: prefill if role is Role.PREFILL else rest for role in self.roles}
        self.grants = credits.grants(self.capacities, [ROUTER])

    def assign(self, roles: tuple[Role, ...]) -> None:
        """Change the roles of this and later processes."""
        self.roles = roles
        self._offer()
        limits = self._limits()
        self.process.requests.assign(limits.roles, limits.held_max)

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def is_silent(self) -> bool:
        return not self.alive or self.is_mute or self.clock.is_asleep

    def restart(self) -> None:
        """Start a new process without any state, in a new epoch."""
        self.clock.end()
        self.epoch += 1
        identity = WorkerIdentity(worker_id=self.worker_id, epoch=self.epoch)
        self.process = SimProcess(
            *(identity, self.wall, self._limits(), self._engine, self._peer_view, self._ports),
            on_work=lambda work: self.on_work(work),
        )

    def clear_slowdown(self) -> None:
        """End the faults that slow this worker down."""
        self.on_work, self.process.engine.gpu.slow_prefill = _ignore_work, 1.0

    def crash(self) -> None:
        """End the process with all its state."""
        self.process.end()

    def _limits(self) -> RequestLimits:
        held_max = 2 * sum(self.capacities.values())
        return RequestLimits(
            roles=frozenset(self.roles),
            model=self.served.model,
            adapters=frozenset(self.served.adapters),
            held_max=held_max,
            seen_max=max(SEEN_MAX, 4 * held_max),
            gateway_partitions=LogSettings().gateway_partitions,
            prefill_running_max=self.setup.prefill_running_max,
        )

    def _engine(self, wake: Callable[[], None]) -> TimedEngine:
        prefill_only = self.roles == (Role.PREFILL,)
        return TimedEngine(
            self.worker_id,
            self.clock,
            self.setup,
            self._exchange,
            self._hashes,
            wake,
            prefill_only=prefill_only,
            make_gpu=self._make_gpu,
            served=self.served,
        )
