"""The options of the search benchmark, and the data and indexes that its parts share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from infra.bench.benchmark import option
from infra.bench.search import vectors
from infra.bench.search.systems import (
    NAMES,
    Curves,
    OperatingPoint,
    System,
    build,
    measure_curves,
    measure_point,
)
from infra.bench.search.zoo.kinds import KINDS
from workers.vector.kernels.arrays import Array

Progress = Callable[[str], None]
PARTS = (
    "speed", "clusters", "every-kind", "build", "mixed", "warm", "updates", "ingest", "kafka",
    "scheduler",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Sets sizes and repeats. Times are seconds of load."""

    parts: tuple[str, ...] = option(PARTS, "of all", flag="only", choices=PARTS)
    indexes: tuple[str, ...] = option(NAMES[1:], "which to compare with ours")
    rows: int = option(100_000)
    dim: int = 128
    queries: int = 2_000
    efforts: tuple[int, ...] = (32, 48, 64, 96, 128, 192, 256)
    repeats: int = option(5)
    builds: int = option(2, "of ours and of hnswlib, in turns")
    separated_rows: int = 40_000
    clusters: int = 400
    kinds: tuple[str, ...] = option(tuple(KINDS), "of the zoo", choices=tuple(KINDS))
    random_seeds: tuple[int, ...] = option((1, 2, 3, 4, 5, 6), "seeds of drawn kinds", flag="drawn")
    zoo_share: float = 1.0  # of a kind's full size
    zoo_queries: int = 1_000
    sequences: int = 500  # of drifting probes
    probes: int = 12
    load_s: float = 4.0  # of each rate of mixed traffic, over all runs
    load_runs: int = 5
    load_shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)  # of the capacity
    linked_rows: tuple[int, ...] = (25_000, 100_000)  # of an index, to which more are linked
    linked_batches: int = 8
    updated_rows: int = 1_000_000
    ingest_rows: int = 1_000_000
    ingest_per_s: int = option(5_000, "rows that come while searches go on")
    ingest_step: int = 100_000  # rows between two measurements of searches alone
    ingest_alone_s: float = 1.5
    kafka_rows: int = 20_000
    kafka_warm_up: int = 2_000  # retrievals each way before the measurement
    kafka_least: int = 20  # retrievals of a repeat at least
    sched_seeds: int = 3
    sched_ms: int = 12_000  # of virtual time
    seed: int = option(1)


QUICK = SearchOptions(
    rows=25_000,
    queries=1_000,
    efforts=(16, 24, 32, 48, 64, 96, 128),
    repeats=3,
    builds=1,
    separated_rows=20_000,
    clusters=200,
    random_seeds=(1, 2),
    zoo_share=0.25,
    zoo_queries=400,
    sequences=200,
    load_s=1.5,
    load_runs=3,
    load_shares=(0.4, 0.6, 0.8),
    linked_rows=(25_000,),
    linked_batches=4,
    updated_rows=100_000,
    ingest_rows=50_000,
    ingest_step=25_000,
    ingest_alone_s=1.0,
    kafka_rows=5_000,
    kafka_warm_up=600,
    kafka_least=5,
    sched_seeds=2,
)

K = 10
_BUILD_THREADS = 2


class SearchScene:
    """The data set that most parts share, and its indexes, each made at its first use."""

    def __init__(self, options: SearchOptions, names: Sequence[str], progress: Progress) -> None:
        self.options, self.names, self.progress = options, names, progress
        self.built: dict[str, list[System]] = {}

    @cached_property
    def _data(self) -> tuple[Array, Array, Array]:
        options = self.options
        size = f"{options.rows} x {options.dim} vectors"
        self.progress(f"{size} in overlapping clusters, true neighbours")
        rows, queries = vectors.overlapping(
            options.rows, options.queries, dim=options.dim, seed=options.seed
        )
        return rows, queries, vectors.truth(rows, queries, K)

    @property
    def rows(self) -> Array:
        return self._data[0]

    @property
    def queries(self) -> Array:
        return self._data[1]

    @property
    def truth(self) -> Array:
        """The true neighbours of each query, shape (queries, K)."""
        return self._data[2]

    @cached_property
    def curves(self) -> Curves:
        """Recall and rate of every system at each effort, one thread."""
        systems = {name: partial(self.point, name) for name in self.names}
        options = self.options
        return measure_curves(systems, options.efforts, options.repeats, self.progress)

    def system(self, name: str, *, build_number: int = 0) -> System:
        """Return a system's index; `build_number` selects one of repeated builds."""
        builds = self.built.setdefault(name, [])
        while len(builds) <= build_number:
            self.progress(f"{name} builds its index on {_BUILD_THREADS} threads")
            builds.append(build(name, self.rows, _BUILD_THREADS, self.options.seed))
        return builds[build_number]

    def point(
        self, name: str, effort: int, threads: int = 1, queries_max: int | None = None
    ) -> OperatingPoint:
        """Search all queries, or the first ones, in one call and time it."""
        queries, truth = self.queries[:queries_max], self.truth[:queries_max]
        search = self.system(name).search
        return measure_point(lambda: search(queries, K, effort, threads), effort, truth)
