"""Commits of records and positions together, and whoever comes next, on a real broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import InvalidTxnState, TopicAuthorizationFailedError

from schemas.errors import BrokerUnavailable, Fenced
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.transactions import (
    TRANSACTION_MS,
    CommittedOffset,
    OutgoingRecord,
    Transactions,
    committed_offsets,
)
from tests.virtual_time import virtual
from tests.waits import pass_time, until

pytestmark = pytest.mark.kafka


def sending(kafka: LogSettings, value: bytes) -> OutgoingRecord:
    return OutgoingRecord(topic=f"{kafka.topic_prefix}answers", partition=0, key=b"k", value=value)


async def read(kafka: LogSettings) -> list[tuple[int, bytes]]:
    reader = AssignedReader(kafka, "answers", [0], client_id="reader", committed_only=True)
    async with reader.reading("earliest"):
        return [(record.offset, record.value) for record in await reader.read_to_end()]


async def test_transaction_commits_records_and_positions_together(kafka: LogSettings) -> None:
    group, place = f"g{uuid4().hex}", (f"{kafka.topic_prefix}prompts", 1)
    name = uuid4().hex
    writer, successor = Transactions(kafka, name), Transactions(kafka, name)
    await writer.start()
    try:
        assert await committed_offsets(kafka, group, [place]) == {}
        value = uuid4().hex.encode()
        (offset,) = await writer.commit(
            [sending(kafka, value)], {place: CommittedOffset(7, "known")}, group
        )
        await writer.commit([], {place: CommittedOffset(8, "known")}, group)
        await successor.start()
        assert await committed_offsets(kafka, group, [place]) == {
            place: CommittedOffset(8, "known")
        }
        assert (offset, value) in await read(kafka)
    finally:
        await asyncio.gather(writer.stop(), successor.stop())


async def test_successor_fences_former_owner_of_transactional_id(kafka: LogSettings) -> None:
    name, group, place = uuid4().hex, f"g{uuid4().hex}", (f"{kafka.topic_prefix}prompts", 1)
    former, successor, third = (Transactions(kafka, name) for _ in range(3))
    await former.start()
    try:
        await former.commit([], {place: CommittedOffset(1)}, group)
        await successor.start()
        late, good = uuid4().hex.encode(), uuid4().hex.encode()
        with pytest.raises(Fenced):
            await former.commit([sending(kafka, late)], {place: CommittedOffset(2)}, group)
        assert await committed_offsets(kafka, group, [place]) == {place: CommittedOffset(1)}
        await successor.commit([sending(kafka, good)], {place: CommittedOffset(3)}, group)
        await third.start()
        values = [value for _, value in await read(kafka)]
        assert good in values and late not in values
        assert await committed_offsets(kafka, group, [place]) == {place: CommittedOffset(3)}
    finally:
        await asyncio.gather(former.stop(), successor.stop(), third.stop())


@pytest.mark.parametrize("voided", [False, True])
async def test_writer_fenced_between_records_raises_fenced(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch, voided: bool
) -> None:
    """aiokafka's sender notices the fencing, and the next call fails with another error."""
    name = uuid4().hex
    writer, successor = Transactions(kafka, name), Transactions(kafka, name)
    sends = [replace(sending(kafka, b"late"), partition=partition) for partition in (0, 1)]
    await writer.start([(record.topic, record.partition) for record in sends] if voided else ())
    try:
        await successor.start()
        producer: Any = writer._producer
        send = producer.send

        async def found_out(*args: Any, **options: Any) -> Any:
            ack = await send(*args, **options)
            await until(producer._txn_manager.is_fatal_error)
            return ack

        monkeypatch.setattr(producer, "send", found_out)
        for _ in range(2):  # the second one does not even begin
            with pytest.raises(Fenced):
                await writer.commit(sends)
    finally:
        await asyncio.gather(writer.stop(), successor.stop())


async def test_commit_raises_first_error_of_transaction(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender finds out that this client may not write to the topic."""
    writer = Transactions(kafka, uuid4().hex)
    refused = sending(kafka, b"refused")
    await writer.start([(refused.topic, refused.partition)])
    producer: Any = writer._producer
    send = producer.send

    async def found_out(*args: Any, **options: Any) -> Any:
        producer._txn_manager.error_transaction(TopicAuthorizationFailedError("answers"))
        return await send(*args, **options)

    monkeypatch.setattr(producer, "send", found_out)
    try:
        with pytest.raises(BrokerUnavailable, match="TopicAuthorizationFailed"):
            await writer.commit([refused])
    finally:
        await writer.stop()


async def leave_open(kafka: LogSettings, name: str) -> None:
    """Leave records of a transaction unknown to its coordinator, as a killed broker can."""
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka.bootstrap, transactional_id=f"{kafka.topic_prefix}{name}"
    )
    place = TopicPartition(f"{kafka.topic_prefix}answers", 0)
    await producer.start()
    try:
        await producer.begin_transaction()
        producer._txn_manager._txn_partitions.add(place)  # so the coordinator is not told
        await producer.send_and_wait(place.topic, b"open", key=b"k", partition=0)
    finally:
        producer._closed = True
        await producer.client.close()
        await producer._sender.close()


async def can_leave_open(kafka: LogSettings, name: str) -> bool:
    try:
        await leave_open(kafka, name)
    except InvalidTxnState:  # the broker still checks
        return False
    return True


@asynccontextmanager
async def unchecked(kafka: LogSettings) -> AsyncIterator[None]:
    """Have the broker accept records without asking the coordinator for their transaction."""

    async def check(flag: str) -> None:
        configs = {"transaction.partition.verification.enable": flag}
        await admin.alter_configs([ConfigResource(ConfigResourceType.BROKER, "1", configs)])

    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await check("false")
        yield
    finally:
        await check("true")
        await admin.close()


async def all_is_decided(kafka: LogSettings) -> bool:
    ends = []
    for decided in (True, False):
        reader = AssignedReader(kafka, "answers", [0], client_id="reader", committed_only=decided)
        async with reader.reading("latest"):
            ends.append(await reader.end_offsets())
    return ends[0] == ends[1]


async def test_writer_voids_transaction_left_open_by_killed_broker(kafka: LogSettings) -> None:
    name, place = uuid4().hex, (f"{kafka.topic_prefix}answers", 0)
    reader, writer = Transactions(kafka, name), Transactions(kafka, name)
    try:
        async with unchecked(kafka):
            await until(lambda: can_leave_open(kafka, name))
            assert not await all_is_decided(kafka)
            await reader.start([place])
            await until(lambda: all_is_decided(kafka))
            await leave_open(kafka, name)
            await writer.start()
            await writer.commit([sending(kafka, b"mine")])
            await until(lambda: all_is_decided(kafka))
            assert [value for _, value in await read(kafka)] == [b"mine"]
    finally:
        await asyncio.gather(reader.stop(), writer.stop())


@virtual
async def test_commit_waits_longer_with_long_request_timeout() -> None:
    """Leaders of a replicated log may change meanwhile."""
    settings = LogSettings(request_timeout_ms=3 * TRANSACTION_MS)
    writer = Transactions(settings, "w")
    writer._producer = SlowProducer(settings.request_timeout_ms - 5_000)
    await writer.commit([])


class SlowProducer:
    """Commits after `after_ms` of waiting."""

    def __init__(self, after_ms: int) -> None:
        self._after_ms = after_ms

    async def begin_transaction(self) -> None:
        """Asks nobody."""

    async def commit_transaction(self) -> None:
        await pass_time(self._after_ms / 1000)
