"""Parts of the search benchmark that concern an index alone: speed, clusters, build, warm probes.

Rates are by the wall clock. Rates by CPU time are reported too, since other load on the machine
affects them less. Warm probes are those of sequences that drift: the first of each is cold, with a
long routing list; later ones start from the routing list of the previous probe as seeds, and have a
short one. Cold searches of all probes with rising effort show how many distances the same recall
costs without seeds.
"""

import asyncio
from dataclasses import asdict
from typing import Any

import numpy as np

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
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index import bulk, inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort, Query
from workers.vector.kernels.arrays import Array

RECALLS = (0.93, 0.98)
_BARS = {"faiss": 1.1, "hnswlib": 1.8}
_BUILD_THREADS = 2
DRIFT = 0.1
COLD_TOP_M, WARM_TOP_M = 128, 32
_COLD = (32, 48, 64, 96, 128, 160, 192, 256)


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


async def _warm(index: Index, probes: Array, engine: SearchEngine) -> tuple[Array, Array]:
    """Return rows, shape (probes, sequences, k), and each probe's distances per search."""

    async def search(vector: Array, seeds: Array | None) -> tuple[Array, Array, int]:
        query = Query(
            vector=vector, k=K, top_m=COLD_TOP_M if seeds is None else WARM_TOP_M,
            seeds=() if seeds is None else seeds[:WARM_TOP_M],
        )  # fmt: skip
        answer = await engine.search(index, query)
        return answer.rows, answer.top, answer.computed

    tops: list[Any] = [None] * probes.shape[1]
    rows, computed = [], []
    for vectors_now in probes:
        pairs = zip(vectors_now, tops, strict=True)
        answered = await asyncio.gather(*[search(vector, seeds) for vector, seeds in pairs])
        rows.append([result[0] for result in answered])
        tops = [result[1] for result in answered]
        computed.append(float(np.mean([result[2] for result in answered])))
    await engine.close()
    return np.array(rows), np.array(computed)


def warm(scene: SearchScene) -> tuple[dict[str, Any], list[Bar]]:
    """Run part 5: recall and distances of warm probes, and of cold searches of equal recall."""
    options, index = scene.options, scene.system(OURS).index
    scene.progress(f"warm probes: {options.probes} of {options.sequences} sequences")
    start = scene.queries[: options.sequences]
    probes = vectors.drifting(start, options.probes, drift=DRIFT, seed=options.seed)
    truth = np.array([vectors.truth(scene.rows, probe, K) for probe in probes])
    engine = SearchEngine(EngineSettings(inbox_max=max(8_192, options.sequences)))
    rows, computed = asyncio.run(_warm(index, probes, engine))
    recalls = [vectors.recall(*pair) for pair in zip(rows, truth, strict=True)]
    warm_recall, warm_distances = float(np.mean(recalls[1:])), float(computed[1:].mean())
    scene.progress("cold searches of the same probes")
    cold = _cold(index, probes[1:].reshape(-1, probes.shape[2]), truth[1:].reshape(-1, K))
    cold_distances = _distances_at(cold, warm_recall)
    share = warm_distances / cold_distances if cold_distances else None
    figures = {
        "recall_by_probe": recalls,
        "distances_by_probe": computed.tolist(),
        "warm_recall": warm_recall,
        "warm_distances": warm_distances,
        "cold": cold,
        "cold_distances_at_equal_recall": cold_distances,
    }
    return figures, [
        at_least("recall of warm probes, least of any", min(recalls[1:]), 0.97),
        at_most("distances of warm probes, of cold ones of equal recall", share, 0.55, "times"),
    ]


def _cold(index: Index, queries: Array, truth: Array) -> list[dict[str, float]]:
    view = index.view()
    prepared = inputs.prepare(queries, view.dim, view.metric)
    out = []
    for top_m in _COLD:
        hits = bulk.search_all(Effort(k=K, top_m=top_m), prepared, view)
        recall = vectors.recall(hits.rows, truth)
        out.append({"top_m": top_m, "recall": recall, "distances": hits.computed / len(prepared)})
    return out


def _distances_at(cold: list[dict[str, float]], recall: float) -> float | None:
    """Return the distances of cold searches at a recall, interpolated over the logarithm of the
    missed share; None beyond the measured efforts."""
    missed = [-np.log(max(1e-6, 1 - row["recall"])) for row in cold]
    target = -np.log(max(1e-6, 1 - recall))
    if not missed[0] <= target <= missed[-1]:
        return None
    return float(np.exp(np.interp(target, missed, np.log([row["distances"] for row in cold]))))
