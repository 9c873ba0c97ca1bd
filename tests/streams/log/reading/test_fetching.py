"""How long fetches wait, and that nothing waits for one that waits long.

On the broker every fetch waits for longer than a test may take: what was not woken would hang.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_UNCOMMITTED, Fetcher, FetchResult, PartitionRecords
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords

from schemas.codec import Codec
from schemas.records import Cancellation, CancelReason
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.log.connecting import client_options, stop_consumer
from streams.log.reading.fetching import FetchTimer, prepare_fetches
from streams.log.transactions import OutgoingRecord, Transactions
from tests.streams.log.reading.odd_batches import batch
from tests.waits import PATIENCE_S, until

_LONG_MS = int(3_000 * PATIENCE_S)
BOTH = frozenset({("a", 0, 5), ("b", 0, 7)})


def test_fetch_timer_backs_off_while_idle() -> None:
    fetches = FetchTimer(100, 1_000)
    assert [fetches.wait_ms(1, BOTH, 2) for _ in range(6)] == [100, 200, 400, 800, 1_000, 1_000]
    news = frozenset({("a", 0, 6), ("b", 0, 7)})
    assert [fetches.wait_ms(1, news, 2) for _ in range(2)] == [100, 200]
    assert fetches.wait_ms(2, news, 2) == 100, "another broker"
    assert fetches.wait_ms(1, news, 2) == 400


def test_fetch_timer_waits_briefly_while_partitions_are_left_out() -> None:
    """Partitions that are read, paused or new wait for the next fetch."""
    fetches = FetchTimer(100, 1_000)
    assert [fetches.wait_ms(1, BOTH, 3) for _ in range(3)] == [100, 100, 100]
    assert [fetches.wait_ms(1, BOTH, 2) for _ in range(2)] == [200, 400]


@pytest.mark.parametrize(("brokers", "waits_ms"), [(1, [100, 200, 400]), (2, [100, 100, 100])])
async def test_fetch_waits_briefly_where_leader_may_change(
    brokers: int, waits_ms: list[int]
) -> None:
    """A new leader is asked only when the fetch under way there has ended."""
    place, request_waits_ms = TopicPartition("a", 0), list[int]()

    async def send(node_id: int, request: Any, **_: Any) -> Any:
        request_waits_ms.append(request._max_wait_ms)
        return SimpleNamespace(topics=[])

    cluster = SimpleNamespace(brokers=lambda: range(brokers), leader_for_partition=lambda _: 1)
    client = SimpleNamespace(send=send, cluster=cluster, _conns={})
    consumer: Any = SimpleNamespace(_client=client, assignment=lambda: {place}, start=None)
    prepare_fetches(consumer, 100, 1_000)
    for _ in waits_ms:
        await client.send(1, FetchRequest(7, 1, 1, 0, [("a", [(0, 5, 1)])]))
    assert request_waits_ms == waits_ms


class Fetched(Fetcher):  # type: ignore[misc]  # aiokafka has no types
    """Has these bytes of each partition, and fetches nothing more."""

    def __init__(self, data: Mapping[TopicPartition, bytes]) -> None:
        self._subscriptions = SubscriptionState()
        self._subscriptions.assign_from_user(list(data))
        self._closed, self._wait_consume_future = False, None
        self.state = self._subscriptions.subscription.assignment
        self._records = {}
        for place, batch_data in data.items():
            self.state.state_value(place).reset_to(0)
            records = PartitionRecords(
                place, MemoryRecords(batch_data), None, 0, None, None, True, READ_UNCOMMITTED
            )
            self._records[place] = FetchResult(
                place, assignment=self.state, partition_records=records, backoff=0
            )

    def __del__(self) -> None:
        """Nothing was started."""


@pytest.mark.parametrize("records_max", [None, 5])
async def test_unreadable_partition_drops_no_records_of_others(
    records_max: int | None,
) -> None:
    """A good partition once returned nothing while its position had moved (found 28)."""
    places = [TopicPartition("a", partition) for partition in range(3)]
    damaged = bytearray(batch([b"d"]))
    damaged[-2] ^= 1
    fetcher = Fetched(
        dict(zip(places, (batch([b"1", b"2"]), bytes(damaged), batch()), strict=True))
    )

    async def start() -> None:
        pass

    client = SimpleNamespace(send=None)
    consumer: Any = SimpleNamespace(_client=client, start=start, _fetcher=fetcher)
    prepare_fetches(consumer, 100, 1_000)
    await consumer.start()
    got = await fetcher.fetched_records(places, 0, records_max)
    positions = {place: fetcher.state.state_value(place).position for place in places}
    assert positions == {place: len(got.get(place, ())) for place in places}
    assert not fetcher._records.keys() & (positions.keys() - got.keys()), "fetched again"


class Consumer:
    """One that fetches for ever; `fetches` are those that it has sent."""

    def __init__(self, log: LogSettings, isolation: str) -> None:
        self.places = [TopicPartition(f"{log.topic_prefix}cancellations", p) for p in range(2)]
        options = client_options(log) | {"request_timeout_ms": 2 * _LONG_MS}
        self.client: Any = AIOKafkaConsumer(
            **options, isolation_level=isolation, auto_offset_reset="earliest"
        )
        self.fetches = 0
        send = self.client._client.send

        async def counted(node_id: Any, request: Any, **options: Any) -> Any:
            self.fetches += isinstance(request, FetchRequest)
            return await send(node_id, request, **options)

        self.client._client.send = counted
        prepare_fetches(self.client, _LONG_MS, _LONG_MS)

    async def fetching(self, partition: int) -> None:
        """Read this partition alone, and return when its fetch waits."""
        before = self.fetches
        self.client.assign([self.places[partition]])
        await until(lambda: self.fetches > before)

    async def offset(self) -> int:
        """Return the offset of the next record."""
        return int((await self.client.getone()).offset)


@asynccontextmanager
async def consumer_of(
    log: LogSettings, isolation: str = "read_uncommitted"
) -> AsyncIterator[Consumer]:
    consumer = Consumer(log, isolation)
    await consumer.client.start()
    try:
        yield consumer
    finally:
        await stop_consumer(consumer.client)


def cancellation() -> Cancellation:
    return Cancellation(request_id="r", session_id="s", reason=CancelReason.CLIENT_GONE, at_ms=1)


async def send(producer: LogProducer, partition: int) -> int:
    ack = await producer.send("cancellations", cancellation(), key="s", partition=partition)
    return int((await ack).offset)


@pytest.mark.kafka
async def test_waiting_fetch_blocks_no_other_request(kafka: LogSettings) -> None:
    """No query, no record and no other partition waits for the fetch."""
    async with (
        LogProducer(kafka, Codec(), durable=True, client_id="writer") as producer,
        consumer_of(kafka) as consumer,
    ):
        await consumer.fetching(0)
        ends = await consumer.client.end_offsets(consumer.places)
        assert set(ends.values()) == {0}
        assert await send(producer, 0) == await consumer.offset()
        await consumer.fetching(1)
        assert await send(producer, 1) == await consumer.offset()
        await consumer.fetching(0)
        assert await send(producer, 0) == 1 + await consumer.offset()  # from its beginning on


@pytest.mark.kafka
async def test_commit_wakes_read_committed_fetch(kafka: LogSettings) -> None:
    writer = Transactions(kafka, uuid4().hex)
    async with consumer_of(kafka, "read_committed") as consumer:
        place = consumer.places[0]
        await writer.start()
        try:
            await consumer.fetching(0)
            sending = OutgoingRecord(topic=place.topic, partition=0, key=b"k", value=b"v")
            assert await writer.commit([sending]) == [await consumer.offset()]
        finally:
            await writer.stop()
