"""Several models: work, KV and usage keep to the model and adapter of the request, and no model
waits while workers are free that can answer it.

Uses records, KV transfers and the workers alone; of the router only which requests are queued.
"""

from collections import Counter

from infra.simulator.cluster import Checker, Cluster
from infra.simulator.machine.kv_exchange import KvMove, MoveKind
from infra.simulator.members.worker import SimWorker
from infra.simulator.models import scope_of
from schemas.records import Capability, Registration, Request, Role, Usage, WarmPrefix, Work
from streams.core.states import State

Name = tuple[str, str]  # model, and adapter or ""
WAIT_MS = 1_500.0  # longest wait of a queued request while workers are idle that can answer it


def name_of(record: Request | Work | WarmPrefix) -> Name:
    """Return the model and the adapter of a record."""
    return record.model, record.adapter


class ModelRecords(Checker):
    """Work goes to processes that serve its model and can load its adapter; KV moves between jobs
    of one model and adapter."""

    def __init__(self) -> None:
        self.counts: Counter[Name] = Counter()  # pieces of work
        self._names: dict[str, Name] = {}  # by request
        self._capabilities: dict[tuple[str, int], Capability] = {}  # by worker and epoch
        self._served: dict[str, str] = {}  # model of each worker's present process

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check work and usage against the requests and the workers' registrations."""
        if isinstance(record, Request):
            self._names.setdefault(record.request_id, name_of(record))
        elif isinstance(record, Registration) and record.capability is not None:
            self._capabilities[record.member_id, record.epoch] = record.capability
            self._served[record.member_id] = record.capability.model
        elif isinstance(record, Work | WarmPrefix):
            self._check_work(record)
        elif isinstance(record, Usage):
            model, adapter = self._names[record.request_id]
            assert record.model == (adapter or model), f"{record.request_id}: used {record.model}"

    def _check_work(self, work: Work | WarmPrefix) -> None:
        name, request_id = name_of(work), work.request_id
        self.counts[name] += 1
        assert name == self._names[request_id], f"{request_id}: work of {name}"
        assert work.cache_scope == scope_of("", work.adapter), f"{request_id}: another scope"
        capability = self._capabilities.get((work.worker_id, work.worker_epoch))
        if capability is not None:  # else its registration was forged
            what = f"{request_id}: work of {name} for {work.worker_id}"
            assert capability.model == work.model, f"{what}, which serves {capability.model}"
            can_load = work.adapter in ("", *capability.adapters)
            assert can_load, f"{what}, which can load {capability.adapters}"

    def on_kv_move(self, move: KvMove) -> None:
        """Check both ends of a KV transfer when it begins."""
        if move.is_done:
            return
        source, target = move.source.engine_id, move.target.engine_id
        what = f"{move.kind.value} of {move.job_id}, {source} to {target}"
        assert self._served[source] == self._served[target], f"{what}: of another model"
        state, job_id = move.source, move.job_id
        if move.kind is MoveKind.READ and move.handle.engine_request_id in state.handovers:
            job_id = move.handle.engine_request_id
        producer = state.handovers.get(job_id) or state.computations[job_id]
        assert producer.job.adapter == move.into.job.adapter, f"{what}: of another adapter"


class ModelWaits(Checker):
    """A request is placed soon while idle workers could answer it, whatever other models' or
    adapters' workers do. Not checked while the router or the log is disturbed."""

    def __init__(self) -> None:
        self.looks = 0  # at requests that waited beside idle workers
        self._since_ms: dict[str, float] = {}  # how long idle workers have been there

    def on_router_death(self) -> None:
        """Forget all waits, as the next router does."""
        self._since_ms.clear()

    def on_tick(self, cluster: Cluster) -> None:
        """Check the queued requests against the workers that are idle now."""
        router, bus, now_ms = cluster.router, cluster.bus, cluster.clock.now_ms
        slow_log = bus.slow or bus.delay_ms != cluster.setup.bus_ms or now_ms < bus.held_until_ms
        if not router.alive or router.is_asleep or slow_log:
            self._since_ms.clear()
            return
        workers = [worker for worker in cluster.workers.values() if _is_idle(worker)]
        requests = [*router.core.tables.requests.by_id.values()]
        queued = [live for live in requests if live.state is State.QUEUED]
        busy = {name for name in map(name_of, (live.request for live in queued)) if name[1]}
        busy = {name for name in busy if _is_busy(cluster, name)}
        before, self._since_ms = self._since_ms, {}
        for live in queued:
            name = name_of(live.request)
            if any(model == name[0] for model, _ in busy):
                continue
            if not _can_answer(cluster, workers, name):
                continue
            self.looks += 1
            since_ms = self._since_ms[live.request_id] = before.get(live.request_id, now_ms)
            assert now_ms - since_ms <= WAIT_MS, (
                f"{live.request_id}: waits for {now_ms - since_ms:.0f} ms beside idle workers of "
                f"{name}"
            )


def _is_idle(worker: SimWorker) -> bool:
    requests = worker.process.requests
    return not (worker.is_silent or requests.draining or len(requests))


def _is_busy(cluster: Cluster, name: Name) -> bool:
    """Return whether a worker that lives and could answer is not idle: requests of the same model
    wait behind one that waits for it, as a queue has one order."""
    workers = cluster.workers.values()
    return any(w.served.answers(*name) and w.alive and not _is_idle(w) for w in workers)


def _can_answer(cluster: Cluster, idle: list[SimWorker], name: Name) -> bool:
    """Return whether idle workers could answer, in a way that no rule of placement refuses: as a
    pair; or a replica where no decode worker is; or a decode worker where no prefill worker is."""
    able = {role for worker in idle if worker.served.answers(*name) for role in worker.roles}
    whole = [worker for worker in cluster.workers.values() if worker.served.model == name[0]]
    roles = {role for worker in whole for role in worker.roles}
    if Role.DECODE not in roles:
        return Role.REPLICA in able
    return Role.DECODE in able and (Role.PREFILL in able or Role.PREFILL not in roles)
