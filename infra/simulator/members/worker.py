"""A simulated worker: one process after the other under a name, each of them a `Life`."""

from collections.abc import Callable

from infra.simulator.log.clock import Clock
from infra.simulator.machine.engine import Hashes, TimedEngine
from infra.simulator.machine.exchange import Exchange
from infra.simulator.machine.gpu import Gpu
from infra.simulator.members.life import Life, Ports
from infra.simulator.members.router import ROUTER
from schemas.records import Role
from schemas.settings import LogSettings
from workers import credits
from workers.config import WorkerSettings
from workers.llm.held import Limits
from workers.llm.peers import Peers
from workers.llm.stream import WorkerIdentity

MODEL = "simulated"


class SimWorker:
    """`life` is the present one, or the last."""

    def __init__(
        self,
        worker_id: str,
        roles: tuple[Role, ...],
        partition: int,
        clock: Clock,
        exchange: Exchange,
        hashes: Hashes,
        known: Peers,
        ports: Ports,
        make_gpu: Callable[..., Gpu] = Gpu,
    ) -> None:
        self.worker_id, self.roles, self.partition = worker_id, roles, partition
        self.clock, self.setup = clock, exchange.setup
        self.epoch = 0
        self._exchange, self._hashes = exchange, hashes
        self._known, self._ports, self._make_gpu = known, ports, make_gpu
        prefill, rest = self.setup.prefill_credits, self.setup.running_max
        # How much work of each role it takes at once.
        self.capacities = {role: prefill if role is Role.PREFILL else rest for role in roles}
        self.grants = credits.grants(self.capacities, [ROUTER])
        self.restart()

    @property
    def alive(self) -> bool:
        return self.life.alive

    def restart(self) -> None:
        """Come back with nothing, as a new life."""
        self.epoch += 1
        identity = WorkerIdentity(worker_id=self.worker_id, epoch=self.epoch)
        self.life = Life(
            identity, self.clock, self._limits(), self._engine, self._known, self._ports
        )

    def crash(self) -> None:
        """Die."""
        self.life.end()

    def _limits(self) -> Limits:
        held_max = 2 * sum(self.capacities.values())
        return Limits(
            roles=frozenset(self.roles),
            model=MODEL,
            held_max=held_max,
            seen_max=max(WorkerSettings().seen_max, 4 * held_max),
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
            model=MODEL,
        )
