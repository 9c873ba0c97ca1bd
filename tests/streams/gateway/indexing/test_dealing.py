"""Which files are put into their stores next."""

from dataclasses import replace
from typing import Any

from schemas.codec import Codec
from schemas.settings import LogSettings
from streams.gateway.indexing.indexer import FILES_AT_ONCE, FILES_OF_TENANT, FOR_NEWCOMERS, Indexer
from streams.gateway.objects.table import Place, Table, key_of
from tests.streams.gateway.memory_objects import MemoryObjects
from tests.streams.gateway.objects.test_table import STORE, wanted

TENANTS = ("bob", "alice", "carol", "dave", "erin")


def indexer(table: Table) -> Indexer:
    objects: Any = MemoryObjects()
    objects.table = table
    unused: Any = None
    return Indexer(LogSettings(), Codec(), objects, unused, is_first=lambda: True, parse_ms=1)


async def test_whoever_has_the_fewest_files_under_way_is_next() -> None:
    """One tenant's thousand files are in front of another's one (found 28)."""
    table = Table()
    for tenant in TENANTS:
        store = replace(STORE, tenant=tenant)
        table.apply(key_of(store), store)
        for number in range(1_000 if tenant == "bob" else 9):
            record = wanted(f"file-{number}", tenant=tenant)
            table.apply(key_of(record), record)
    dealt, jobs = indexer(table), dict[Place, Any]()

    def begun() -> list[str]:
        names = list[str]()
        while (place := dealt._next(jobs, True)) is not None:
            jobs[place] = 1, True, None
            names.append(place[0])
        return names

    first = begun()
    assert first[:5] == list(TENANTS) and len(first) == FILES_AT_ONCE - FOR_NEWCOMERS
    assert max(map(first.count, TENANTS)) <= FILES_OF_TENANT
    jobs = {place: job for place, job in jobs.items() if place[0] == "bob"}
    assert begun()[:4] == list(TENANTS[1:])
    assert dealt._next(jobs, False) is None, "nothing is to be taken away"


async def test_a_fifth_tenants_file_waits_for_nobody() -> None:
    """Four tenants with eight slow files each had all (review of 28)."""
    table, jobs = Table(), dict[Place, Any]()
    dealt = indexer(table)
    for tenant in TENANTS:
        store = replace(STORE, tenant=tenant)
        table.apply(key_of(store), store)
        for number in range(9):
            record = wanted(f"file-{number}", tenant=tenant)
            table.apply(key_of(record), record)
        while (place := dealt._next(jobs, True)) is not None:
            jobs[place] = 1, True, None
        assert any(place[0] == tenant for place in jobs)
