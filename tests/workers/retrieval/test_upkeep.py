"""New documents are linked and deleted ones compacted away, in the background."""

import asyncio
from typing import Any

from schemas.errors import QueueFull
from schemas.records import (
    Document,
)
from schemas.retrieval import pack_vector
from tests.waits import until
from tests.workers.vector.data import gaussian, lose
from workers.retrieval.collections import Collections
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.settings import LOOSE_MIN, RetrievalSettings
from workers.retrieval.upkeep import Upkeep
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.audit import MANY


def change(name: str, vector: Any, collection: str = "c", **fields: Any) -> DocumentChange:
    document = Document(
        document_id=name, collection=collection, vector=pack_vector(vector), at_ms=0, **fields
    )
    return DocumentChange(collection, name, document)


async def test_upkeep_links_new_rows_and_compacts_deleted_ones() -> None:
    settings = RetrievalSettings(upkeep_interval_ms=1)
    collections = Collections(settings)
    rows = gaussian(1_500, 4)
    collections.apply([change(str(i), row) for i, row in enumerate(rows)])
    engine = SearchEngine(EngineSettings(lanes=1))
    upkeep = Upkeep(settings, collections, engine.neighbours)
    await upkeep.finish()
    index = collections.get("c")
    assert index.loose == 0
    collections.apply([change(f"new{i}", row) for i, row in enumerate(gaussian(50, 4, seed=1))])
    assert index.loose == 50
    running = asyncio.create_task(upkeep.run())
    await until(lambda: index.loose == 0)
    assert engine.load().searches_total >= 50 / 8, "the engine searched for their neighbours"
    collections.apply([DocumentChange("c", str(i), None) for i in range(600)])
    await until(lambda: index.rows.count == len(index) == 950)
    running.cancel()
    await engine.close()


async def test_upkeep_relinks_lost_rows_without_compaction() -> None:
    """Otherwise the audit's findings would stand until the index grew."""
    settings = RetrievalSettings(upkeep_interval_ms=1)
    collections = Collections(settings)
    collections.apply([change(str(i), row) for i, row in enumerate(gaussian(1_500, 64))])
    engine = SearchEngine(EngineSettings(lanes=1))
    upkeep = Upkeep(settings, collections, engine.neighbours)
    await upkeep.finish()
    index = collections.get("c")
    lose(index, share=0.05)
    graph = index.graph
    running = asyncio.create_task(upkeep.run())
    await until(lambda: index.audit is not None and index.audit.missed_share <= MANY)
    running.cancel()
    await engine.close()
    assert index.graph is not graph
    assert engine.load().searches_total >= 1_500 / 8, "the engine searched for them"


async def test_upkeep_retries_link_after_full_engine() -> None:
    settings = RetrievalSettings(upkeep_interval_ms=1)
    collections, refused = Collections(settings), 0
    collections.apply([change(str(i), row) for i, row in enumerate(gaussian(1_500, 4))])

    async def full(*_: Any) -> Any:
        nonlocal refused
        refused += 1
        raise QueueFull("expected fewer than 1 waiting searches")

    upkeep = Upkeep(settings, collections, full)
    await upkeep.finish()
    collections.apply([change("new", [1, 2, 3, 4])])
    running = asyncio.create_task(upkeep.run())
    await until(lambda: refused >= 2)
    assert collections.get("c").loose == 1 and not running.done()
    running.cancel()


async def test_upkeep_links_without_engine_while_feed_waits() -> None:
    """With all places taken, links would starve and every search scan more rows."""
    settings = RetrievalSettings(upkeep_interval_ms=1, loose_max=1_024)
    collections, link_calls, over = Collections(settings), 0, asyncio.Event()
    collections.apply([change(str(i), row) for i, row in enumerate(gaussian(2_500, 4))])
    await collections.wait_for_room()  # at the start all rows are read, then linked
    assert collections.held_back_ms == 0

    async def starving(*_: Any) -> Any:
        nonlocal link_calls
        link_calls += 1
        await over.wait()
        raise QueueFull("expected fewer than 1 waiting searches")

    upkeep = Upkeep(settings, collections, starving)
    await upkeep.finish()
    collections.apply([change(f"new{i}", row) for i, row in enumerate(gaussian(1_030, 4, seed=1))])
    collections.linked = asyncio.Event()
    feed = asyncio.create_task(collections.wait_for_room())
    await asyncio.sleep(0)
    collections.linked.set()  # somebody linked, not enough
    for _ in range(3):
        await asyncio.sleep(0)
    assert collections.are_behind() and not feed.done()
    running = asyncio.create_task(upkeep.run())
    await feed
    assert collections.held_back_ms > 0
    index = collections.get("c")
    await until(lambda: link_calls == 1)
    assert LOOSE_MIN <= index.loose <= 512, "half of what the feed waits for"
    collections.apply([change(f"last{i}", row) for i, row in enumerate(gaussian(600, 4, seed=2))])
    await until(lambda: link_calls == 2)
    assert LOOSE_MIN <= index.loose <= 512
    over.set()
    running.cancel()
