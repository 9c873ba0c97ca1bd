"""The load of each shard of the retrieval pool, and the pace of one of its workers.

A worker's pace is its rate of answers while it has more searches than slots; it cannot be faster.
The pace depends on the queries and the machine, so it is measured, and is unknown until a worker
was full. Searches that arrived too late are refused at once and do not count. Pure: time is an
argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.scaling.ewma import Ewma
from infra.scaling.pools import PoolLoad, mean
from schemas.fleet import Member

_NEWEST = 0.2  # weight of the last measurement in a pace


@dataclass(frozen=True, slots=True)
class _WorkerSample:
    """Counts of a worker at the last measurement."""

    epoch: int
    heard_ms: int
    answered: int
    is_full: bool


class RetrievalMeter:
    """Measures the load and the pace of retrieval workers, by shard."""

    def __init__(self) -> None:
        self._samples: dict[str, _WorkerSample] = {}
        self._rates: dict[str, float] = {}  # searches per second, by worker
        self._under_way, self._per_s = Ewma[int](), Ewma[int]()  # by shard
        self._paces: dict[int, float] = {}

    def measure(self, workers: Sequence[Member], passed_ms: float) -> tuple[PoolLoad, ...]:
        """Measure the ready `workers`, `passed_ms` after the last call; return the loads by
        shard."""
        names = {worker.member_id for worker in workers}
        for name in self._samples.keys() - names:
            del self._samples[name]
            self._rates.pop(name, None)
        for worker in workers:
            self._sample(worker)
        registrations = [w.registration.search for w in workers if w.registration.search]
        numbers = max((registration.shards for registration in registrations), default=0)
        return tuple(
            self._shard([w for w in workers if shard_of(w) == number], number, passed_ms)
            for number in range(numbers)
        )

    def _sample(self, worker: Member) -> None:
        """Update a worker's rate and its shard's pace from the searches that it answered."""
        name, load = worker.member_id, worker.search
        if load is None:
            return
        before = self._samples.get(name)
        answered = load.searches_total - load.misses_total
        now = _WorkerSample(worker.epoch, worker.seen_ms, answered, _is_full(worker))
        if before is not None and before.epoch == now.epoch:
            if now.heard_ms <= before.heard_ms:
                return
            answered_count = max(0, now.answered - before.answered)
            self._rates[name] = rate = 1_000 * answered_count / (now.heard_ms - before.heard_ms)
            if before.is_full and now.is_full and rate:
                shard = shard_of(worker)
                pace = self._paces.get(shard, rate)
                self._paces[shard] = pace + _NEWEST * (rate - pace)
        self._samples[name] = now

    def _shard(self, workers: Sequence[Member], number: int, passed_ms: float) -> PoolLoad:
        per_s = sum(self._rates.get(worker.member_id, 0.0) for worker in workers)
        return PoolLoad(
            present=len(workers),
            under_way=self._under_way.update(number, sum(map(search_load, workers)), passed_ms),
            slots=mean(w.registration.search.slots for w in workers if w.registration.search),
            per_s=self._per_s.update(number, per_s, passed_ms),
            pace_per_s=self._paces.get(number, 0.0),
        )


def search_load(worker: Member) -> float:
    """Return the searches that a worker runs or has yet to read; older releases report fewer
    fields."""
    load = worker.search
    if load is None:
        return 0.0
    in_engine = load.running + load.waiting_prefill + load.waiting_decode
    return load.unread + max(load.answering, in_engine)


def shard_of(worker: Member) -> int:
    """Return the worker's shard, or -1 for a worker of another pool."""
    search = worker.registration.search
    return -1 if search is None else search.shard


def _is_full(worker: Member) -> bool:
    search = worker.registration.search
    return search is not None and search_load(worker) > search.slots
