"""Links of new rows through the engine: the same graph, and never in the way of a search."""

import asyncio
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, EngineDead, InvalidRequest
from tests.waits import until
from tests.workers.vector.data import overlapping
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.audit import Neighbours
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Query

VECTORS, QUERIES = overlapping(3_000, 50, dim=16)


def index_with_loose_rows() -> Index:
    index = Index.build(VECTORS[:2_500], degree=16)
    index.upsert(range(2_500, 3_000), VECTORS[2_500:])
    return index


def through(engine: SearchEngine) -> Neighbours:
    loop = asyncio.get_running_loop()

    def neighbours(*arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(engine.neighbours(*arguments), loop).result()

    return neighbours


async def test_engine_link_builds_same_graph_as_index() -> None:
    alone, index = index_with_loose_rows(), index_with_loose_rows()
    assert alone.link() == 0
    engine = SearchEngine(EngineSettings(lanes=2, places=4, slots=8))
    assert await asyncio.to_thread(index.link, neighbours=through(engine)) == 0
    assert index.graph.tobytes() == alone.graph.tobytes()
    assert index.entries.tobytes() == alone.entries.tobytes()
    await engine.close()


async def test_engine_answers_searches_while_links_take_few_places() -> None:
    index = index_with_loose_rows()
    engine = SearchEngine(EngineSettings(lanes=1, places=2, slots=8))
    linking = asyncio.ensure_future(asyncio.to_thread(index.link, neighbours=through(engine)))
    await until(lambda: engine.load().running > 0 or linking.done())
    truth, _ = Index.build(VECTORS[:2_500], degree=16).search(QUERIES)
    for query, _rows in zip(QUERIES, truth, strict=True):
        load = engine.load()
        assert load.running + load.parked + load.waiting[SearchKind.LINK] <= 1, "one a lane"
        answer = await engine.search(index, Query(vector=query))
        assert len(answer.rows) == 10
    assert await linking == 0
    await engine.close()


async def test_engine_close_ends_link_and_leaves_index_unchanged() -> None:
    index = index_with_loose_rows()
    engine = SearchEngine(EngineSettings(lanes=1))
    linking = asyncio.ensure_future(asyncio.to_thread(index.link, neighbours=through(engine)))
    await engine.close()
    with pytest.raises(EngineDead):
        await linking
    assert index.loose == 500
    rows, _ = index.search(VECTORS[2_900:2_910])
    assert rows[:, 0].tolist() == list(range(2_900, 2_910))
    assert np.isin(index.graph, np.arange(2_500)).all()
    assert index.link() == 0


async def test_engine_rejects_links_beyond_its_slots() -> None:
    index = index_with_loose_rows()
    engine = SearchEngine(EngineSettings(lanes=1, k_max=20))
    with pytest.raises(InvalidRequest, match="expected k from 1 to 20, found 24"):
        await asyncio.to_thread(index.link, neighbours=through(engine))
    assert index.loose == 500
    await engine.close()
    for slots in (8, 24):
        with pytest.raises(ConfigError, match=f"engine.slots: .* a power of two.*found {slots}"):
            EngineSettings(places=12, slots=slots)
