"""Copies of a topic, and whether they have what was written before they are asked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.topic_follower import TopicFollower
from streams.log.transactions import OutgoingRecord, Transactions
from tests.waits import meanwhile, until

pytestmark = pytest.mark.kafka


class Copy:
    """Holds what a follower has read; applies nothing while `may_apply` is not set."""

    def __init__(self, log: LogSettings) -> None:
        self.values: list[bytes] = []
        self.may_apply = asyncio.Event()
        self.may_apply.set()
        self.follower = TopicFollower("objects", wait_ms=60_000)
        self.reader = AssignedReader(log, "objects", [0], client_id="copy", committed_only=True)
        self.reads = 0

    async def follow(self) -> None:
        async with (
            self.reader.reading("earliest"),
            aclosing(self.follower.follow(self.reader)) as batches,
        ):
            async for records in batches:
                self.reads += 1
                await self.may_apply.wait()
                self.values += [record.value for record in records]

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator["Copy"]:
        async with meanwhile(self.follow()):
            yield self


@contextlib.asynccontextmanager
async def writer(kafka: LogSettings) -> AsyncIterator[Transactions]:
    transactions = Transactions(kafka, uuid4().hex)
    await transactions.start()
    try:
        yield transactions
    finally:
        await transactions.stop()


def sending(kafka: LogSettings, value: bytes) -> OutgoingRecord:
    return OutgoingRecord(topic=f"{kafka.topic_prefix}objects", partition=0, key=b"k", value=value)


async def write(kafka: LogSettings, *values: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=0) as producer:
        for value in values:
            record = sending(kafka, value)
            await producer.send_and_wait(record.topic, value, key=record.key, partition=0)


async def test_follower_catches_up_with_earlier_writes(kafka: LogSettings) -> None:
    """It also waits for records that were read but not applied yet."""
    async with Copy(kafka).following() as copy:
        await copy.follower.catch_up()
        assert copy.values == []
        for value in (b"1", b"2", b"3"):
            await write(kafka, value)
            await copy.follower.catch_up()
            assert copy.values[-1] == value
        copy.may_apply.clear()
        before = copy.reads
        await write(kafka, b"4")
        await until(lambda: copy.reads > before)
        catch_ups = asyncio.gather(*(copy.follower.catch_up() for _ in range(9)))
        assert await copy.reader.has_reached({0: 4}) and not catch_ups.done()
        copy.may_apply.set()
        await catch_ups
        assert copy.values == [b"1", b"2", b"3", b"4"]


async def test_follower_does_not_wait_for_open_transactions(kafka: LogSettings) -> None:
    """It does not wait for a transaction's marker either, which is no record."""
    async with Copy(kafka).following() as copy, writer(kafka) as transactions:
        await transactions.commit([sending(kafka, b"1")])
        await until(lambda: copy.values == [b"1"])  # seen a moment after its commit
        await copy.follower.catch_up()
        open_one = AIOKafkaProducer(
            bootstrap_servers=kafka.bootstrap, transactional_id=uuid4().hex, linger_ms=0
        )
        async with open_one:
            await open_one.begin_transaction()
            record = sending(kafka, b"2")
            await open_one.send_and_wait(record.topic, record.value, key=record.key, partition=0)
            await copy.follower.catch_up()
            assert copy.values == [b"1"]
            await open_one.abort_transaction()
        await write(kafka, b"3")
        await until(lambda: copy.values == [b"1", b"3"])


async def test_follower_continues_with_next_reader(kafka: LogSettings) -> None:
    """A query meanwhile waits for the next reader instead of getting the old copy."""
    copy = Copy(kafka)
    async with copy.following():
        await write(kafka, b"1")
        await copy.follower.catch_up()
    await write(kafka, b"2")
    copy.values.clear()
    waits = asyncio.gather(copy.follower.catch_up(), copy.follower.reach({0: 2}))
    async with copy.following():
        await waits
        assert copy.values == [b"1", b"2"]


async def test_follower_without_reader_fails_after_wait_limit(kafka: LogSettings) -> None:
    follower = TopicFollower("objects", wait_ms=1)
    for wait in (follower.catch_up(), follower.reach({0: 1})):
        with pytest.raises(BrokerUnavailable, match="objects: not read in 0.001 s"):
            await wait
