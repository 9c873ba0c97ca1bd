"""Documents that are there already, from a broker that hands them over in any order."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiokafka import TopicPartition

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable
from schemas.records import CollectionMade, Document
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from schemas.topics import collection_key, document_key
from streams.log import clients
from streams.log.clients import AssignedReader
from workers.retrieval.collections import Collections
from workers.retrieval.feed.documents import DocumentFollower
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.settings import RetrievalSettings, ShardPlace

CODEC = Codec()
SETTINGS = LogSettings(document_partitions=3)
GOOD, BAD = np.ones(4), np.ones(3)


class Broker:
    """A consumer; `chance` draws what comes next."""

    _client = SimpleNamespace(send=None)  # never asked
    _fetcher = SimpleNamespace(fetched_records=None, _subscriptions=None)

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
        records = self._log[place.partition][begin : begin + self._chance.randint(1, 3)]
        self._at[place.partition] += len(records)
        return {place: records} if records else {}


def document_of(name: str, vector: Any, at_ms: int = 1) -> Document:
    return Document(document_id=name, collection="c", vector=pack_vector(vector), at_ms=at_ms)


def log_of(*written: tuple[int, int, str, Any]) -> dict[int, list[Any]]:
    """Partitions with documents: partition, timestamp, id and vector (or None) of each."""
    log: dict[int, list[Any]] = {p: [] for p in range(SETTINGS.document_partitions)}
    for partition, timestamp, name, vector in written:
        value = None
        if vector is not None:
            value = CODEC.encode(document_of(name, vector, timestamp))
        record = SimpleNamespace(
            topic="documents", partition=partition, offset=len(log[partition]),
            timestamp=timestamp, key=document_key("c", name).encode(), value=value,
        )  # fmt: skip
        log[partition].append(record)
    return log


def feed_of(collections: Collections, producer: Any) -> DocumentFollower:
    member: Any = SimpleNamespace(member_id="r")
    return DocumentFollower(SETTINGS, CODEC, producer, collections, ShardPlace(0, 1), member)


async def read(
    log: dict[int, list[Any]], seed: int, patch: pytest.MonkeyPatch, collections: Collections,
    offsets: dict[int, int] | None = None,
) -> tuple[dict[str, tuple[int, int]], list[str]]:  # fmt: skip
    """Dimension and documents of each collection, and what was refused."""
    chance = random.Random(seed)
    patch.setattr(clients, "AIOKafkaConsumer", lambda **_: Broker(log, chance))
    feed = feed_of(collections, None)
    assert await feed.start(offsets) == sum(
        len(records) - (offsets or {}).get(partition, 0) for partition, records in log.items()
    )
    assert feed.offsets == {partition: len(records) for partition, records in log.items()}
    dims_and_counts = {state.name: (state.dim, state.documents) for state in collections.states()}
    refused = [record.key.decode() for record, _ in feed.refusals._waiting.values()]
    return dims_and_counts, sorted(refused)


@pytest.mark.parametrize("batch", [1, 2, 5_000])
async def test_oldest_document_fixes_dimension_in_any_read_order(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DocumentFollower, "history_batch", batch)
    good = [(1, at, f"a{at}", GOOD) for at in (10, 30, 40)] + [(2, 11, "b", GOOD)]
    log = log_of((0, 20, "bad", BAD), (0, 35, "c", GOOD), *good)
    tied = log_of((1, 10, "good", GOOD), (2, 10, "bad", BAD))
    emptied = log_of(
        (1, 10, "was", BAD), (1, 15, "was", None), (0, 20, "new", GOOD), (2, 21, "late", BAD)
    )
    for seed in range(20):
        collections = [Collections(RetrievalSettings()) for _ in range(3)]
        assert await read(log, seed, monkeypatch, collections[0]) == ({"c": (4, 5)}, ["c/bad"])
        assert await read(tied, seed, monkeypatch, collections[1]) == ({"c": (4, 1)}, ["c/bad"])
        assert await read(emptied, seed, monkeypatch, collections[2]) == ({"c": (4, 1)}, ["c/late"])


async def test_document_feed_survives_fault_in_one_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the worker would end again at every start."""
    collections = Collections(RetrievalSettings())
    upserted, decoded = collections._add, Codec.decode

    def add(name: str, group: Any) -> None:
        if any(change.document_id == "wrong" for change in group):
            raise ZeroDivisionError("a fault")
        upserted(name, group)

    def decode(codec: Codec, value: bytes) -> Any:
        if (record := decoded(codec, value)).document_id == "odd":
            raise ArithmeticError("another")
        return record

    monkeypatch.setattr(collections, "_add", add)
    monkeypatch.setattr(Codec, "decode", decode)
    names = ("a", "wrong", "b", "odd", "c")
    log = log_of(*((0, at, name, GOOD) for at, name in enumerate(names, 10)))
    assert await read(log, 0, monkeypatch, collections) == ({"c": (4, 3)}, ["c/odd", "c/wrong"])


async def test_snapshot_dimension_overrides_older_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = log_of((0, 10, "held", GOOD), (1, 5, "older", BAD), (1, 6, "good", GOOD))
    for seed in range(20):
        collections = Collections(RetrievalSettings())
        before = {p: records[: int(p == 0)] for p, records in log.items()}
        await read(before, seed, monkeypatch, collections)
        offsets = {p: len(records) for p, records in before.items()}
        result = await read(log, seed, monkeypatch, collections, offsets)
        assert result == ({"c": (4, 2)}, ["c/older"])


async def test_document_feed_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come faster than they are linked would slow every search."""
    collections, documents = Collections(RetrievalSettings()), list[int]()

    async def room() -> None:
        documents.append(sum(len(index) for index in collections.indexes.values()))

    monkeypatch.setattr(collections, "wait_for_room", room)
    monkeypatch.setattr(DocumentFollower, "history_batch", 2)
    await read(log_of(*((0, at, f"a{at}", GOOD) for at in range(4))), 0, monkeypatch, collections)
    assert documents[:3] == [0, 2, 4], "asked before each batch"


async def test_reader_by_time_buffers_few_newer_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition is far ahead of the other in time."""
    old = [(0, at, f"o{at}", GOOD) for at in range(50)]
    log = log_of(*old, *((1, at, f"n{at}", GOOD) for at in range(100, 200)))
    broker = Broker(log, random.Random(0))
    monkeypatch.setattr(clients, "AIOKafkaConsumer", lambda **_: broker)
    monkeypatch.setattr(clients, "_HELD_MAX", 10)
    reader = AssignedReader(SETTINGS, "documents", range(3), client_id="r")
    await reader.start("earliest")
    timestamps: list[int] = []
    async for record in reader.by_time(await reader.end_offsets()):
        timestamps.append(record.timestamp)
        if record.partition == 0:
            assert broker._at[1] <= 12, "those held, and the last that came"
    assert timestamps == [*range(50), *range(100, 200)]


@pytest.mark.parametrize("batch", [1, 5_000])
async def test_recorded_dimension_outlives_its_documents(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction leaves a refused document as the oldest, but the shard has a record."""
    monkeypatch.setattr(DocumentFollower, "history_batch", batch)
    collections = Collections(RetrievalSettings())
    await read(log_of((1, 10, "a", GOOD), (2, 20, "bad", BAD)), 0, monkeypatch, collections)
    assert collections.unpublished_dims() == {"c": 4}
    log = log_of((2, 20, "bad", BAD), (0, 30, "a", GOOD), (1, 31, "b", GOOD))
    dimension_record = CollectionMade(collection="c", dim=4, shard=0, shards=1, at_ms=40)
    key = collection_key("c", 0, 1).encode()
    log[0].append(
        SimpleNamespace(
            topic="documents", partition=0, offset=len(log[0]), timestamp=40, key=key,
            value=CODEC.encode(dimension_record),
        )
    )  # fmt: skip
    for seed in range(20):
        reread_collections = Collections(RetrievalSettings())
        assert await read(log, seed, monkeypatch, reread_collections) == ({"c": (4, 2)}, ["c/bad"])
        assert reread_collections.unpublished_dims() == {}
        reread_collections.apply([DocumentChange("c", name, None) for name in ("a", "b")])
        reread_collections.apply([DocumentChange("c", "new", document_of("new", BAD))])
        assert reread_collections.unpublished_dims() == {"c": 3}, (
            "without documents it takes the dimension of the next"
        )


async def test_first_replica_writes_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes each once, in partition 0, and tries again after the broker has failed."""
    writes: list[tuple[Any, str, int]] = []

    class Producer:
        broken = True

        async def send(self, topic: str, record: Any, *, key: str, partition: int) -> Any:
            if self.broken:
                raise BrokerUnavailable("away")
            writes.append((record, key, partition))
            ack = asyncio.get_running_loop().create_future()
            ack.set_result(None)
            return ack

    collections = Collections(RetrievalSettings())
    change = feed_of(collections, producer := Producer())
    collections.apply([DocumentChange("c", "a", document_of("a", GOOD))])
    first = False
    monkeypatch.setattr(change, "_is_first", lambda: first)

    async def batch(**_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(change._reader, "batch", batch)
    for producer.broken, first in ((False, False), (True, True), (False, True), (False, True)):
        running = asyncio.create_task(change.run())
        for _ in range(9):
            await asyncio.sleep(0)
        running.cancel()
        assert bool(writes) == (first and not producer.broken)
    ((record, key, partition),) = writes
    assert (record.collection, record.dim, key, partition) == ("c", 4, "/0/1/c", 0)
