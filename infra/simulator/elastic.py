"""A simulated cluster that scales its pools, as `trivium up --autoscale` does.

The policy, the hysteresis and the steps are those of `infra/scaling`, which gets the fleet's own
records. A new worker is ready some time after its start. A drain ends when the worker has no active
request. A move is a drain and a start that takes no time, because the engine stays up. Worker hours
include workers that start and those that drain.
"""

from collections.abc import Iterable

from infra.scaling.pools import PoolKey
from infra.scaling.scaler import Scaler
from infra.scaling.settings import ScalingSettings
from infra.scaling.steps import DrainWorker, MoveWorker, ReloadWorker, StartWorker, Step, steps
from infra.simulator.cluster import Checker, Cluster
from infra.simulator.members.worker import SimWorker
from infra.simulator.models import MODEL
from schemas.fleet import FleetView
from schemas.records import Heartbeat, Registration, Role
from schemas.settings import LogSettings

LOOK_MS = 1_000.0
POLL_MS = 100.0
HEARD_MS = 1_000.0  # until every router knows that a worker drains


class FleetWatcher(Checker):
    """Applies the members' records to a fleet view."""

    def __init__(self) -> None:
        self.view = FleetView()
        self._offset = 0

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Apply a registration or a heartbeat to the view."""
        if isinstance(record, Registration | Heartbeat):
            self._offset += 1
            self.view.apply(record, self._offset, int(now_ms))


class Elastic:
    """Scales one cluster from `begin` on."""

    def __init__(
        self, cluster: Cluster, fleet: FleetWatcher, settings: ScalingSettings, start_ms: float
    ) -> None:
        self._cluster, self._fleet, self._start_ms = cluster, fleet, start_ms
        self._scaler = Scaler(settings)
        self._starting: dict[Role, int] = {}
        self._leaving: set[str] = set()
        self._names = 0
        self.counts: list[tuple[float, dict[Role, int]]] = []  # time, and workers by role

    def begin(self) -> None:
        """Scale now, and then every `LOOK_MS`."""
        self._look()

    @property
    def _serving(self) -> list[SimWorker]:
        workers = self._cluster.workers.values()
        return [
            worker for worker in workers if worker.alive and worker.worker_id not in self._leaving
        ]

    def _look(self) -> None:
        clock = self._cluster.clock
        clock.after(LOOK_MS, self._look)
        now_ms = int(clock.now_ms)
        workers: dict[PoolKey, list[str]] = {}
        for worker in sorted(self._serving, key=lambda worker: -len(worker.process.requests)):
            workers.setdefault(PoolKey(worker.roles[0], MODEL), []).append(worker.worker_id)
        starting = {PoolKey(role, MODEL): count for role, count in self._starting.items()}
        present = {
            pool: len(workers.get(pool, ())) + starting.get(pool, 0)
            for pool in (*workers, *starting)
        }
        look = self._scaler.plan(self._fleet.view, now_ms)
        if look is not None:
            targets = self._scaler.settle(look, present, now_ms)
            coming = {
                pool: [*[""] * starting.get(pool, 0), *workers.get(pool, ())] for pool in targets
            }  # a worker that starts is not drained
            for step in steps(coming, targets):
                self._carry_out(step)
        self._count()

    def _count(self) -> None:
        there = dict(self._starting)
        for worker in self._cluster.workers.values():
            if worker.alive:
                there[worker.roles[0]] = there.get(worker.roles[0], 0) + 1
        self.counts.append((self._cluster.clock.now_ms, there))

    def _carry_out(self, step: Step) -> None:
        match step:
            case StartWorker(pool):
                self._begin(pool.role, self._start_ms)
            case DrainWorker(name):
                self._drain(name, None)
            case MoveWorker(name, role):
                self._drain(name, role)
            case ReloadWorker():
                raise AssertionError("a simulated cluster has one model")

    def _begin(self, role: Role, after_ms: float) -> None:
        self._starting[role] = self._starting.get(role, 0) + 1
        self._cluster.clock.after(after_ms, lambda: self._join(role))

    def _join(self, role: Role) -> None:
        self._starting[role] -= 1
        used_partitions = {
            worker.partition for worker in self._cluster.workers.values() if worker.alive
        }
        free = (n for n in range(LogSettings().worker_partitions) if n not in used_partitions)
        self._names += 1
        worker = self._cluster.make_worker(f"{role}-more-{self._names}", (role,), next(free))
        self._cluster.workers[worker.worker_id] = worker
        self._cluster.members.join(worker)

    def _drain(self, name: str, then: Role | None) -> None:
        worker = self._cluster.workers.get(name)
        if worker is None or not worker.alive:
            return  # it is still starting
        self._leaving.add(name)
        worker.process.drain()
        self._cluster.clock.after(HEARD_MS, lambda: self._leave(worker, then))

    def _leave(self, worker: SimWorker, then: Role | None) -> None:
        if len(worker.process.requests) or worker.process.engine.state.handovers:
            self._cluster.clock.after(POLL_MS, lambda: self._leave(worker, then))
            return
        if worker.alive:
            self._cluster.members.leave(worker)
        if then is not None:
            self._begin(then, 0.0)


def worker_hours(
    counts: Iterable[tuple[float, dict[Role, int]]], begin_ms: float, end_ms: float
) -> float:
    """Return the hours of all workers between two times, from counts over time."""
    worker_ms, last_ms, last = 0.0, begin_ms, 0
    for at_ms, there in counts:
        upto_ms = min(max(at_ms, begin_ms), end_ms)
        worker_ms += last * (upto_ms - last_ms)
        last_ms, last = upto_ms, sum(there.values())
    return (worker_ms + last * (end_ms - last_ms)) / 3_600_000
