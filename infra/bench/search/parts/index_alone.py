"""Parts of the search benchmark that concern an index alone: speed, clusters, build.

Systems take turns effort by effort within each repeat, so that ratios compare measurements side by
side. Rates are by the wall clock. Rates by CPU time are reported too, since other load on the
machine affects them less.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infra.bench.results import Bar, at_least, at_most, median, median_ratio
from infra.bench.search import vectors
from infra.bench.search.options import Progress, SearchOptions
from infra.bench.search.systems import OURS, OperatingPoint, System, at_rate, at_recall, build
from workers.vector.kernels.arrays import Array

Curves = dict[str, list[list[OperatingPoint]]]  # by system, by repeat

K = 10
_RECALLS = (0.93, 0.98)
_BARS = {"faiss": 1.1, "hnswlib": 1.8}
_BUILD_THREADS = 2


@dataclass(slots=True)
class SearchScene:
    """The data set that most parts share, and its indexes, each built at its first use."""

    options: SearchOptions
    names: Sequence[str]
    progress: Progress
    rows: Array
    queries: Array
    truth: Array
    built: dict[str, list[System]]

    @classmethod
    def create(
        cls, options: SearchOptions, names: Sequence[str], progress: Progress
    ) -> "SearchScene":
        progress(f"{options.rows} x {options.dim} vectors in overlapping clusters, true neighbours")
        rows, queries = vectors.overlapping(
            options.rows, options.queries, dim=options.dim, seed=options.seed
        )
        truth = vectors.truth(rows, queries, K)
        return cls(options, names, progress, rows, queries, truth, {})

    def system(self, name: str, *, build_number: int = 0) -> System:
        """Return a system's index; `build_number` selects one of repeated builds."""
        builds = self.built.setdefault(name, [])
        while len(builds) <= build_number:
            self.progress(f"{name} builds its index on {_BUILD_THREADS} threads")
            builds.append(build(name, self.rows, _BUILD_THREADS, self.options.seed))
        return builds[build_number]


def measure_point(
    system: System, queries: Array, truth: Array, effort: int, threads: int = 1
) -> OperatingPoint:
    """Search all queries in one call and time it."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    rows = system.search(queries, truth.shape[1], effort, threads)
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return OperatingPoint(
        effort=effort,
        recall=vectors.recall(rows, truth),
        queries_per_s=len(queries) / took_s,
        queries_per_cpu_s=len(queries) / max(took_cpu_s, 1e-9),
    )


def curves(scene: SearchScene) -> Curves:
    """Return recall and rate of every system at each effort, one thread."""
    out: Curves = {name: [] for name in scene.names}
    for name in scene.names:
        measure_point(scene.system(name), scene.queries, scene.truth, scene.options.efforts[0])
    for repeat in range(scene.options.repeats):
        scene.progress(f"search speed, repeat {repeat + 1} of {scene.options.repeats}")
        for points in out.values():
            points.append([])
        for effort in scene.options.efforts:
            for name, points in out.items():
                system = scene.system(name)
                points[-1].append(measure_point(system, scene.queries, scene.truth, effort))
    return out


def speed(scene: SearchScene, measured: Curves) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 1: queries per second at equal recall, and with two threads."""
    at: dict[str, Any] = {}
    bars: list[Bar] = []
    for recall in _RECALLS:
        row: dict[str, Any] = {}
        ours = [at_recall(points, recall) for points in measured[OURS]]
        ours_cpu = [at_recall(points, recall, of_cpu=True) for points in measured[OURS]]
        for name, repeats in measured.items():
            rates = [at_recall(points, recall) for points in repeats]
            rates_cpu = [at_recall(points, recall, of_cpu=True) for points in repeats]
            row[name] = {
                "queries_per_s": median(rates),
                "queries_per_cpu_s": median(rates_cpu),
                "trivium_times": median_ratio(ours, rates),
                "trivium_times_by_cpu": median_ratio(ours_cpu, rates_cpu),
            }
            if name in _BARS:
                times, label = row[name]["trivium_times"], f"speed at recall {recall}, of {name}'s"
                bars.append(at_least(label, times, _BARS[name], "times"))
        at[str(recall)] = row
    threads = _threads(scene)
    bars.append(at_least("speed of two threads, of one's", threads, 1.8, "times"))
    figures = {
        "at_recall": at,
        "two_threads_times": threads,
        "curves": {name: _medians(repeats) for name, repeats in measured.items()},
    }
    return figures, bars


def _threads(scene: SearchScene) -> float | None:
    system, effort = scene.system(OURS), 64
    rates: dict[int, list[float | None]] = {1: [], 2: []}
    for _ in range(max(3, scene.options.repeats)):
        for threads, thread_rates in rates.items():
            point = measure_point(system, scene.queries, scene.truth, effort, threads)
            thread_rates.append(point.queries_per_s)
    return median_ratio(rates[2], rates[1])


def _medians(repeats: Sequence[Sequence[OperatingPoint]]) -> list[dict[str, Any]]:
    """Return the median of each effort over the repeats."""
    out = []
    for same in zip(*repeats, strict=True):
        row: dict[str, Any] = asdict(same[0])
        for key in ("queries_per_s", "queries_per_cpu_s"):
            row[key] = median([getattr(point, key) for point in same])
        out.append(row)
    return out


def clusters(
    options: SearchOptions, names: Sequence[str], progress: Progress
) -> tuple[Any, list[Bar]]:
    """Run part 2: recall on clusters so far apart that a walk cannot go from one to the next."""
    rows, queries = vectors.separated(
        options.separated_rows, options.queries, clusters=options.clusters, seed=options.seed
    )
    truth = vectors.truth(rows, queries, K)
    figures: dict[str, Any] = {}
    for name in [name for name in names if name in (OURS, "hnswlib")]:
        progress(f"{options.clusters} separated clusters: {name}")
        system = build(name, rows, _BUILD_THREADS, options.seed)
        figures[name] = asdict(measure_point(system, queries, truth, 64))
    ours = figures[OURS]["recall"]
    return figures, [at_least(f"recall on {options.clusters} separated clusters", ours, 0.99, "")]


def build_times(scene: SearchScene, measured: Curves) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 3: time to build, and our recall at hnswlib's speed."""
    compared = [name for name in (OURS, "hnswlib") if name in scene.names]
    for build_number in range(1, scene.options.builds):
        for name in compared:
            scene.system(name, build_number=build_number)
    figures = {
        name: {
            "build_s": median([system.build_s for system in systems]),
            "build_cpu_s": median([system.build_cpu_s for system in systems]),
            "builds_s": [round(system.build_s, 2) for system in systems],
        }
        for name, systems in scene.built.items()
    }
    if len(compared) < 2:
        return figures, []
    ours_s, hnswlib_s = ([system.build_s for system in scene.built[name]] for name in compared)
    ratio = median_ratio(ours_s[: len(hnswlib_s)], hnswlib_s[: len(ours_s)])
    rates = [at_recall(points, _RECALLS[0]) for points in measured["hnswlib"]]
    pairs = zip(measured[OURS], rates, strict=True)
    recall = median([at_rate(points, rate) if rate else None for points, rate in pairs])
    label = f"recall at the speed at which hnswlib has {_RECALLS[0]}"
    return figures, [
        at_most("time to build, of hnswlib's", ratio, 0.6, "times"),
        at_least(label, recall, _RECALLS[0], ""),
    ]
