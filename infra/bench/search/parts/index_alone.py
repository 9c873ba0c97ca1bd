"""Parts of the search benchmark that concern an index alone: speed, clusters, build.

Rates are by the wall clock. Rates by CPU time are reported too, since other load on the machine
affects them less.
"""

from dataclasses import asdict
from typing import Any

from infra.bench.results import Bar, at_least, at_most, median, median_ratio
from infra.bench.search import vectors
from infra.bench.search.scene import K, SearchScene
from infra.bench.search.systems import (
    OURS,
    at_rate,
    at_recall,
    build,
    measure_point,
    median_curves,
    speeds,
)

RECALLS = (0.93, 0.98)
_BARS = {"faiss": 1.1, "hnswlib": 1.8}
_BUILD_THREADS = 2


def speed(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 1: queries per second at equal recall, and with two threads."""
    at = speeds(scene.curves, RECALLS)
    bars = [
        at_least(
            f"speed at recall {recall}, of {name}'s", row["trivium_times"], _BARS[name], "times"
        )
        for recall, rows in at.items()
        for name, row in rows.items()
        if name in _BARS
    ]
    rates: dict[int, list[float | None]] = {1: [], 2: []}
    for _ in range(max(3, scene.options.repeats)):
        for threads, thread_rates in rates.items():
            thread_rates.append(scene.point(OURS, 64, threads).queries_per_s)
    times = median_ratio(rates[2], rates[1])
    bars.append(at_least("speed of two threads, of one's", times, 1.8, "times"))
    curves = median_curves(scene.curves)
    return {"at_recall": at, "two_threads_times": times, "curves": curves}, bars


def clusters(scene: SearchScene) -> tuple[Any, list[Bar]]:
    """Run part 2: recall on clusters so far apart that a walk cannot go from one to the next."""
    options = scene.options
    rows, queries = vectors.separated(
        options.separated_rows, options.queries, clusters=options.clusters, seed=options.seed
    )
    truth = vectors.truth(rows, queries, K)
    figures: dict[str, Any] = {}
    for name in [name for name in scene.names if name in (OURS, "hnswlib")]:
        scene.progress(f"{options.clusters} separated clusters: {name}")
        search = build(name, rows, _BUILD_THREADS, options.seed).search
        figures[name] = asdict(measure_point(lambda: search(queries, K, 64, 1), 64, truth))  # noqa: B023  # called at once
    ours = figures[OURS]["recall"]
    return figures, [at_least(f"recall on {options.clusters} separated clusters", ours, 0.99)]


def build_times(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 3: time to build, and our recall at hnswlib's speed."""
    curves = scene.curves
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
    rates = [at_recall(points, RECALLS[0]) for points in curves["hnswlib"]]
    pairs = zip(curves[OURS], rates, strict=True)
    recall = median([at_rate(points, rate) if rate else None for points, rate in pairs])
    label = f"recall at the speed at which hnswlib has {RECALLS[0]}"
    return figures, [
        at_most("time to build, of hnswlib's", ratio, 0.6, "times"),
        at_least(label, recall, RECALLS[0]),
    ]
