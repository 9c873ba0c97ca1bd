"""New documents are linked and deleted ones compacted away, in the background."""

import asyncio
from typing import Any

from schemas.errors import QueueFull
from schemas.records import (
    Document,
)
from schemas.retrieval import pack_vector
from tests.waiting import until
from tests.workers.search.data import gaussian, lose
from workers.search.engine.engine import EngineSettings, SearchEngine
from workers.search.index.audit import MANY
from workers.search.service.collections import Collections
from workers.search.service.settings import LOOSE_MIN, RetrievalSettings
from workers.search.service.upkeep import Upkeep
from workers.search.words.changes import DocumentChange


def change(name: str, vector: Any, collection: str = "c", **fields: Any) -> DocumentChange:
    document = Document(
        document_id=name, collection=collection, vector=pack_vector(vector), at_ms=0, **fields
    )
    return DocumentChange(collection, name, document)


async def test_new_rows_are_linked_once_they_rest_and_deleted_ones_compacted() -> None:
    settings = RetrievalSettings(upkeep_interval_ms=1)
    held = Collections(settings)
    rows = gaussian(1_500, 4)
    held.apply([change(str(i), row) for i, row in enumerate(rows)])
    engine = SearchEngine(EngineSettings(lanes=1))
    upkeep = Upkeep(settings, held, engine.neighbours)
    await upkeep.finish()
    index = held.get("c")
    assert index.loose == 0
    held.apply([change(f"new{i}", row) for i, row in enumerate(gaussian(50, 4, seed=1))])
    assert index.loose == 50
    running = asyncio.create_task(upkeep.run())
    await until(lambda: index.loose == 0)
    assert engine.load().searches_total >= 50 / 8, "the engine searched for their neighbours"
    held.apply([DocumentChange("c", str(i), None) for i in range(600)])
    await until(lambda: index.rows.count == len(index) == 950)
    running.cancel()
    await engine.close()


async def test_rows_that_searches_lose_are_found_again_without_a_compaction() -> None:
    """What an audit told stayed as it was until the index grew."""
    settings = RetrievalSettings(upkeep_interval_ms=1)
    held = Collections(settings)
    held.apply([change(str(i), row) for i, row in enumerate(gaussian(1_500, 64))])
    engine = SearchEngine(EngineSettings(lanes=1))
    upkeep = Upkeep(settings, held, engine.neighbours)
    await upkeep.finish()
    index = held.get("c")
    lose(index, share=0.05)
    graph = index.graph
    running = asyncio.create_task(upkeep.run())
    await until(lambda: index.audit is not None and index.audit.missed_share <= MANY)
    running.cancel()
    await engine.close()
    assert index.graph is not graph
    assert engine.load().searches_total >= 1_500 / 8, "the engine searched for them"


async def test_an_engine_that_is_full_is_asked_to_link_again_later() -> None:
    settings = RetrievalSettings(upkeep_interval_ms=1)
    held, refused = Collections(settings), 0
    held.apply([change(str(i), row) for i, row in enumerate(gaussian(1_500, 4))])

    async def full(*_: Any) -> Any:
        nonlocal refused
        refused += 1
        raise QueueFull("expected fewer than 1 waiting searches")

    upkeep = Upkeep(settings, held, full)
    await upkeep.finish()
    held.apply([change("new", [1, 2, 3, 4])])
    running = asyncio.create_task(upkeep.run())
    await until(lambda: refused >= 2)
    assert held.get("c").loose == 1 and not running.done()
    running.cancel()


async def test_rows_that_wait_are_linked_without_the_engine_and_the_feed_waits_for_that() -> None:
    """Where all places are taken links would starve, and every search scan more rows."""
    settings = RetrievalSettings(upkeep_interval_ms=1, loose_max=1_024)
    held, asked, over = Collections(settings), 0, asyncio.Event()
    held.apply([change(str(i), row) for i, row in enumerate(gaussian(2_500, 4))])
    await held.wait_for_room()  # at the start all rows are read, then linked
    assert held.held_back_ms == 0

    async def starving(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        await over.wait()
        raise QueueFull("expected fewer than 1 waiting searches")

    upkeep = Upkeep(settings, held, starving)
    await upkeep.finish()
    held.apply([change(f"new{i}", row) for i, row in enumerate(gaussian(1_030, 4, seed=1))])
    held.linked = asyncio.Event()
    feed = asyncio.create_task(held.wait_for_room())
    await asyncio.sleep(0)
    held.linked.set()  # somebody linked, not enough
    for _ in range(3):
        await asyncio.sleep(0)
    assert held.are_behind() and not feed.done()
    running = asyncio.create_task(upkeep.run())
    await feed
    assert held.held_back_ms > 0
    index = held.get("c")
    await until(lambda: asked == 1)
    assert LOOSE_MIN <= index.loose <= 512, "half of what the feed waits for"
    held.apply([change(f"last{i}", row) for i, row in enumerate(gaussian(600, 4, seed=2))])
    await until(lambda: asked == 2)
    assert LOOSE_MIN <= index.loose <= 512
    over.set()
    running.cancel()
