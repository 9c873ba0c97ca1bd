"""Static batches, the baseline of mixed traffic: whole batches, and what the engine finds."""

import asyncio

from infra.bench.search.parts.mixed_servers import BATCH, EngineServer, StaticBatches
from tests.workers.vector.data import clustered_index, gaussian
from workers.vector.index.kinds import SearchKind

QUERIES = gaussian(6 * BATCH, 20, seed=6)


async def test_static_batches_return_same_hits_as_engine() -> None:
    index = clustered_index(2_000)
    kinds = [SearchKind.PREFILL if i % 5 == 0 else SearchKind.DECODE for i in range(len(QUERIES))]
    results, orders = [], list[int]()
    engine, static = EngineServer(index), StaticBatches(index)
    for server in (engine, static):

        async def search_one(
            number: int, server: EngineServer | StaticBatches = server
        ) -> list[int]:
            rows = await server.search(QUERIES[number], kinds[number], None)
            if server is static:
                orders.append(number)
            return [int(row) for row in rows]

        results.append(await asyncio.gather(*map(search_one, range(len(QUERIES)))))
    assert results[0] == results[1]

    batches = [sorted(orders[at : at + BATCH]) for at in range(0, len(QUERIES), BATCH)]
    assert sorted(batches) == [list(range(at, at + BATCH)) for at in range(0, len(QUERIES), BATCH)]
    used, places = static.places_used()
    assert 0 < used <= places
    for server in (engine, static):
        await server.close()
