"""Part of the search benchmark: decode's probes that begin where the previous probe ended.

Sequences drift. The first probe of each is cold, with a long routing list. Later ones start from
the routing list of the previous probe as seeds, and have a short one. Cold searches of all probes
with rising effort show how many distances the same recall costs without seeds.
"""

import asyncio
from typing import Any

import numpy as np

from infra.bench.results import Bar, at_least, at_most
from infra.bench.search import vectors
from infra.bench.search.scene import K, SearchScene
from infra.bench.search.systems import OURS
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index import bulk, inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort, Query
from workers.vector.kernels.arrays import Array

DRIFT = 0.1
COLD_TOP_M, WARM_TOP_M = 128, 32
_COLD = (32, 48, 64, 96, 128, 160, 192, 256)


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
