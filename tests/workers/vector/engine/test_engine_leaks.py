"""Nothing grows with the number of searches, however they end: slots, memory, what a pool holds."""

import asyncio
import contextlib
import gc
import tracemalloc

from schemas.errors import TriviumError
from streams.log.clock import wall_ms
from tests.workers.vector.data import clustered_index, gaussian
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.filters.filters import EqualFilter
from workers.vector.index.index import Index
from workers.vector.index.inputs import prepare
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Effort, Query

ONE_BY_ONE, IN_BULK, TOGETHER = 12_000, 45_000, 100
QUERIES = gaussian(TOGETHER, 20, seed=2)


async def search_once(engine: SearchEngine, index: Index, number: int) -> None:
    """A search that ends, is cancelled, is too late or is wrong, by its number."""
    vector = QUERIES[number % TOGETHER]
    where = EqualFilter("part", 3) if number % 3 == 0 else None
    kind = SearchKind.PREFILL if number % 2 else SearchKind.DECODE
    late = wall_ms() - 1 if number % 11 == 0 else None
    k = 0 if number % 13 == 0 else 5
    query = Query(vector=vector, k=k, top_m=16, where=where, kind=kind, deadline_ms=late)
    task = asyncio.ensure_future(engine.search(index, query))
    if number % 7 == 0:
        await asyncio.sleep(0)
        task.cancel()
    with contextlib.suppress(TriviumError, asyncio.CancelledError):
        await task


async def many(engine: SearchEngine, index: Index, count: int) -> None:
    for first in range(0, count, TOGETHER):
        await asyncio.gather(*(search_once(engine, index, first + i) for i in range(TOGETHER)))


async def test_engine_memory_does_not_grow_over_many_searches() -> None:
    """Some 60 000 searches run through 8 slots."""
    index = clustered_index(1_500)
    engine = SearchEngine(EngineSettings(lanes=1, places=8, slots=8))
    bulk = prepare(gaussian(IN_BULK // 9, 20, seed=4), 20, index.metric)
    await many(engine, index, ONE_BY_ONE // 3)
    await engine.neighbours(index.view(), bulk, Effort(k=3, top_m=8))
    gc.collect()
    tracemalloc.start()
    try:
        await many(engine, index, ONE_BY_ONE // 3)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(8):
            await engine.neighbours(index.view(), bulk, Effort(k=3, top_m=8))
        await many(engine, index, ONE_BY_ONE // 3)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    load = engine.load()
    assert load.running == load.parked == sum(load.waiting.values()) == 0
    assert load.searches_total >= ONE_BY_ONE // 2
    await engine.close()
