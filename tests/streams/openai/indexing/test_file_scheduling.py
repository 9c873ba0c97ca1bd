"""Which files are put into their stores next, and how many of their documents."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from schemas.codec import Codec
from schemas.records import Document
from schemas.settings import LogSettings
from streams.openai.indexing.indexer import (
    FILES_AT_ONCE,
    FILES_OF_TENANT,
    FOR_NEWCOMERS,
    INDEXED_NEXT,
    Indexer,
)
from streams.openai.objects.table import FileKey, ObjectTable, key_of
from tests.streams.gateway.memory_objects import MemoryObjects
from tests.streams.openai.objects.test_table import STORE, store_file
from tests.waits import until

TENANTS = ("bob", "alice", "carol", "dave", "erin")


def indexer(table: ObjectTable) -> Indexer:
    objects: Any = MemoryObjects()
    objects.table = table
    unused: Any = None
    return Indexer(LogSettings(), Codec(), objects, unused, is_first=lambda: True, parse_ms=1)


async def test_indexer_prefers_tenant_with_fewest_active_files() -> None:
    """A thousand files of one tenant do not delay another's single file."""
    table = ObjectTable()
    for tenant in TENANTS:
        store = replace(STORE, tenant=tenant)
        table.apply(key_of(store), store)
        for number in range(1_000 if tenant == "bob" else 9):
            record = store_file(f"file-{number}", tenant=tenant)
            table.apply(key_of(record), record)
    dealt, jobs = indexer(table), dict[FileKey, Any]()

    def start_files() -> list[str]:
        names = list[str]()
        while (place := dealt._next(jobs, True)) is not None:
            jobs[place] = 1, True, None
            names.append(place[0])
        return names

    first = start_files()
    assert first[:5] == list(TENANTS) and len(first) == FILES_AT_ONCE - FOR_NEWCOMERS
    assert max(map(first.count, TENANTS)) <= FILES_OF_TENANT
    jobs = {place: job for place, job in jobs.items() if place[0] == "bob"}
    assert start_files()[:4] == list(TENANTS[1:])
    assert dealt._next(jobs, False) is None, "nothing is to be taken away"


async def test_indexer_reserves_slots_for_new_tenants() -> None:
    """Four tenants with eight slow files each must not take all slots."""
    table, jobs = ObjectTable(), dict[FileKey, Any]()
    dealt = indexer(table)
    for tenant in TENANTS:
        store = replace(STORE, tenant=tenant)
        table.apply(key_of(store), store)
        for number in range(9):
            record = store_file(f"file-{number}", tenant=tenant)
            table.apply(key_of(record), record)
        while (place := dealt._next(jobs, True)) is not None:
            jobs[place] = 1, True, None
        assert any(place[0] == tenant for place in jobs)


class ReadAtOnce:
    """In place of an ingester: embedding workers are through with each document at once, and no
    index tells how far it is before `tell`."""

    def __init__(self) -> None:
        self.put_count = 0
        self._waiting: list[Callable[[str], None]] = []

    async def put(
        self, document: Document, on_done: Callable[[str], None], on_read: Callable[[], None]
    ) -> None:
        self.put_count += 1
        self._waiting.append(on_done)
        on_read()

    def tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback("")


async def test_indexer_writes_documents_without_waiting_for_heartbeats() -> None:
    """Waiting for each heartbeat would take minutes for 20 000 documents."""
    ingester: Any = ReadAtOnce()
    document: Any = None
    dealt = indexer(ObjectTable())
    writing = asyncio.create_task(dealt._write_and_wait(ingester, [document] * (INDEXED_NEXT + 1)))
    await until(lambda: ingester.put_count == INDEXED_NEXT)
    ingester.tell()
    await until(lambda: ingester.put_count == INDEXED_NEXT + 1)
    ingester.tell()
    assert await writing == ""
