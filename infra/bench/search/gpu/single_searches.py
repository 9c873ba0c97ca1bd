"""Part of the GPU search benchmark: searches that arrive one by one, as they do at a worker."""

import asyncio
import time
from typing import Any

from infra.bench.results import percentiles
from workers.vector.cuda.batch import BatchSettings
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.index import Index
from workers.vector.index.query import Query
from workers.vector.kernels.arrays import Array

TOP_M = 64
LONE_WIDTH = 8  # fewer and larger extends, which make a search alone faster
_WARM_UP = 50


def singles(
    index: Index, queries: Array, batch: BatchSettings, *, one_by_one: int, callers: int, asks: int
) -> dict[str, Any]:
    """Return the ms of a search alone, and the searches per second of concurrent callers."""
    return asyncio.run(_singles(index, queries, batch, one_by_one, callers, asks))


async def _singles(
    index: Index, queries: Array, batch: BatchSettings, one_by_one: int, callers: int, asks: int
) -> dict[str, Any]:
    width = min(LONE_WIDTH, batch.tasks_max // index.degree)
    engine = SearchEngine(EngineSettings(device="cuda", cuda=batch))
    try:
        for i in range(_WARM_UP):
            await _took_ms(engine, index, queries[i % len(queries)], width)
        lone = [
            await _took_ms(engine, index, queries[i % len(queries)], width)
            for i in range(one_by_one)
        ]

        async def caller(number: int) -> list[float]:
            chosen = [(number * asks + i) % len(queries) for i in range(asks)]
            return [await _took_ms(engine, index, queries[row], 1) for row in chosen]

        began_s = time.perf_counter()
        times_ms = sum(await asyncio.gather(*map(caller, range(callers))), [])
        took_s = time.perf_counter() - began_s
    finally:
        await engine.close()
    return {
        "lone": {**percentiles(lone, prefix="ms_p"), "width": width},
        "callers": {
            **percentiles(times_ms, prefix="ms_p"),
            "callers": callers,
            "per_s": len(times_ms) / took_s,
        },
    }


async def _took_ms(engine: SearchEngine, index: Index, vector: Array, width: int) -> float:
    began_s = time.perf_counter()
    await engine.search(index, Query(vector=vector, k=10, top_m=TOP_M, width=width))
    return (time.perf_counter() - began_s) * 1_000
