"""When the load of the retrieval benchmark may begin."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from infra.bench.retrieval.loads import wait_held_by_all
from schemas.errors import EngineFailed
from schemas.records import CollectionState, Role, SearchLoad
from streams.log.clock import wall_ms
from tests.infra.watched_fleet import fleet
from tests.streams.builders import beat, registration


def tell(watch: Any, name: str, seq: int, documents: int) -> None:
    """A copy says how much it holds."""
    collection = CollectionState(name="books", dim=4, metric="cosine", documents=documents)
    heartbeat = replace(beat(name, seq), search=SearchLoad(collections=(collection,)))
    watch.view.apply(heartbeat, 100 + seq, wall_ms() + 60_000)


async def test_load_waits_for_documents_on_all_copies() -> None:
    """One of two copies had no documents of the collection yet when the other had answered."""
    watch, now_ms = fleet(), wall_ms() + 60_000
    for number, name in enumerate(("retrieval-0", "retrieval-1")):
        retrieval_member = replace(registration(name, partition=number), roles=[Role.RETRIEVAL])
        watch.view.apply(retrieval_member, 50 + number, now_ms)
        tell(watch, name, 1, 3)
    await wait_held_by_all(watch, {"books": 3}, 60)
    tell(watch, "retrieval-1", 2, 2)
    with pytest.raises(EngineFailed, match=r"not all documents within 0 s: retrieval-1$"):
        await wait_held_by_all(watch, {"books": 3}, 0)
    waiting = asyncio.create_task(wait_held_by_all(watch, {"books": 3}, 60))
    tell(watch, "retrieval-1", 3, 3)
    await waiting
