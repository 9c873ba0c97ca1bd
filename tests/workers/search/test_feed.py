"""Documents that are there already, from a broker that hands them over in any order."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiokafka import TopicPartition

from schemas.codec import Codec
from schemas.log import clients
from schemas.log.clients import AssignedReader
from schemas.records import Document
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from schemas.topics import document_key
from workers.search import feed as module
from workers.search.collections import Collections
from workers.search.feed import DocumentFeed
from workers.search.settings import RetrievalSettings, ShardPlace

CODEC = Codec()
SETTINGS = LogSettings(document_partitions=3)
GOOD, BAD = np.ones(4), np.ones(3)


class Broker:
    """A consumer; `chance` draws what comes next."""

    def __init__(self, log: dict[int, list[Any]], chance: random.Random) -> None:
        self._log, self._chance = log, chance
        self._at: dict[int, int] = {}

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def assign(self, places: list[TopicPartition]) -> None: ...

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._at[place.partition] = offset

    def resume(self, *places: TopicPartition) -> None: ...

    async def position(self, place: TopicPartition) -> int:
        return self._at[place.partition]

    async def beginning_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: len(self._log[place.partition]) for place in places}

    async def getmany(self, *places: TopicPartition, **_: Any) -> dict[TopicPartition, Any]:
        place = self._chance.choice(places)
        begin = self._at[place.partition]
        found = self._log[place.partition][begin : begin + self._chance.randint(1, 3)]
        self._at[place.partition] += len(found)
        return {place: found} if found else {}


def log_of(*written: tuple[int, int, str, Any]) -> dict[int, list[Any]]:
    """Partitions with documents: partition, timestamp, id and vector (or None) of each."""
    log: dict[int, list[Any]] = {p: [] for p in range(SETTINGS.document_partitions)}
    for partition, timestamp, name, vector in written:
        value = None
        if vector is not None:
            packed = pack_vector(vector)
            value = CODEC.encode(
                Document(document_id=name, collection="c", vector=packed, at_ms=timestamp)
            )
        record = SimpleNamespace(
            topic="documents", partition=partition, offset=len(log[partition]),
            timestamp=timestamp, key=document_key("c", name).encode(), value=value,
        )  # fmt: skip
        log[partition].append(record)
    return log


async def read(
    log: dict[int, list[Any]], seed: int, patch: pytest.MonkeyPatch, collections: Collections,
    offsets: dict[int, int] | None = None,
) -> tuple[dict[str, tuple[int, int]], list[str]]:  # fmt: skip
    """Dimension and documents of each collection, and what was refused."""
    chance = random.Random(seed)
    patch.setattr(clients, "AIOKafkaConsumer", lambda **_: Broker(log, chance))
    member: Any = SimpleNamespace(member_id="r")
    producer: Any = None
    feed = DocumentFeed(SETTINGS, CODEC, producer, collections, ShardPlace(0, 1), member)
    assert await feed.start(offsets) == sum(
        len(records) - (offsets or {}).get(partition, 0) for partition, records in log.items()
    )
    assert feed.offsets == {partition: len(records) for partition, records in log.items()}
    held = {state.name: (state.dim, state.documents) for state in collections.states()}
    refused = [record.key.decode() for record, _ in feed.refusals._waiting.values()]
    return held, sorted(refused)


@pytest.mark.parametrize("batch", [1, 2, 5_000])
async def test_the_oldest_document_fixes_the_dimension_whatever_comes_first(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HISTORY_BATCH", batch)
    good = [(1, at, f"a{at}", GOOD) for at in (10, 30, 40)] + [(2, 11, "b", GOOD)]
    log = log_of((0, 20, "bad", BAD), (0, 35, "c", GOOD), *good)
    tied = log_of((1, 10, "good", GOOD), (2, 10, "bad", BAD))
    emptied = log_of(
        (1, 10, "was", BAD), (1, 15, "was", None), (0, 20, "new", GOOD), (2, 21, "late", BAD)
    )
    for seed in range(20):
        held = [Collections(RetrievalSettings()) for _ in range(3)]
        assert await read(log, seed, monkeypatch, held[0]) == ({"c": (4, 5)}, ["c/bad"])
        assert await read(tied, seed, monkeypatch, held[1]) == ({"c": (4, 1)}, ["c/bad"])
        assert await read(emptied, seed, monkeypatch, held[2]) == ({"c": (4, 1)}, ["c/late"])


async def test_the_dimension_of_a_snapshot_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of((0, 10, "held", GOOD), (1, 5, "older", BAD), (1, 6, "good", GOOD))
    for seed in range(20):
        held = Collections(RetrievalSettings())
        before = {p: records[: int(p == 0)] for p, records in log.items()}
        await read(before, seed, monkeypatch, held)
        offsets = {p: len(records) for p, records in before.items()}
        found = await read(log, seed, monkeypatch, held, offsets)
        assert found == ({"c": (4, 2)}, ["c/older"])


async def test_few_records_wait_for_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition is far ahead of the other in time."""
    old = [(0, at, f"o{at}", GOOD) for at in range(50)]
    log = log_of(*old, *((1, at, f"n{at}", GOOD) for at in range(100, 200)))
    broker = Broker(log, random.Random(0))
    monkeypatch.setattr(clients, "AIOKafkaConsumer", lambda **_: broker)
    monkeypatch.setattr(clients, "_HELD_MAX", 10)
    reader = AssignedReader(SETTINGS, "documents", range(3), client_id="r")
    await reader.start("earliest")
    seen: list[int] = []
    async for record in reader.by_time(await reader.end_offsets()):
        seen.append(record.timestamp)
        if record.partition == 0:
            assert broker._at[1] <= 12, "those held, and the last that came"
    assert seen == [*range(50), *range(100, 200)]
