"""Who writes what requests have used, in which order, and who goes on with the numbers."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from infra.story.usage import read_usage
from schemas.codec import Codec
from schemas.errors import Fenced
from schemas.records import OutcomeKind
from schemas.settings import LogSettings
from streams.agents import usage as usage_module
from streams.agents.outbox import Outbox
from streams.agents.usage import UsageWriter
from streams.core.effects import Decide, Dispatch, Effect, End, RecordUsage
from streams.core.events import Tick
from streams.core.handlers.endings import usage_of
from streams.core.requests.live import new_live_request
from streams.log.clients import Ack, AssignedReader
from streams.log.connecting import client_options
from streams.log.faust.group import Receipts
from streams.log.transactions import Transactions
from tests.streams import builders
from tests.streams.agents.fakes import FakeProducer, standing
from tests.streams.core.router_setups import replicas
from tests.streams.log.reading.odd_batches import batch, produce_batch
from tests.waits import until

PLACE = ("requests", 0)


class Uses:
    """Writes when the test says so."""

    def __init__(self) -> None:
        self.writes: list[tuple[RecordUsage, Ack | None, Ack]] = []

    def take(self, use: RecordUsage, outcome: Ack | None) -> Ack:
        ack: Ack = asyncio.get_running_loop().create_future()
        self.writes.append((use, outcome, ack))
        return ack


def outbox(producer: FakeProducer, uses: Uses) -> Outbox:
    searches: list[Any] = []
    return Outbox(producer, "test.", "router-a", 100, standing, searches.append, uses.take)  # type: ignore[arg-type]  # a fake


def expired() -> list[Effect]:
    """What follows where a worker has not ended a request in time."""
    on = replicas(1, deadline_grace_ms=100)
    on.request("r1", deadline_ms=on.now_ms + 100)
    on.now_ms += 300
    return on.apply(Tick())


async def test_usage_waits_for_its_outcome_without_delaying_orders() -> None:
    """Marks and receipts wait until it is committed; orders do not."""
    effects = expired()
    assert {type(effect) for effect in effects} == {Decide, Dispatch, End, RecordUsage}
    producer, uses = FakeProducer(at_once=False), Uses()
    box, receipts, acked = outbox(producer, uses), Receipts(), list[str]()
    task = asyncio.create_task(box.run())
    receipt = receipts.open(PLACE, functools.partial(acked.append, "r"), len(effects))
    box.put(effects, receipt)
    await until(lambda: bool(uses.writes))
    ((use, outcome, usage_ack),) = uses.writes
    topics = [topic for topic, *_ in producer.sends]
    assert outcome is producer.acks[topics.index("outcomes")]
    assert use.usage.kind is OutcomeKind.EXPIRED
    for ack in producer.acks:
        ack.set_result(None)
    await until(lambda: len(producer.acks) == 4)  # the void order
    producer.acks[-1].set_result(None)
    await until(lambda: box.ending == {"r1": 1})
    assert acked == []
    usage_ack.set_result(None)
    await box.drain()
    assert not box.ending and acked == ["r"]
    task.cancel()


async def test_outbox_ends_when_usage_cannot_be_written() -> None:
    on, uses = replicas(1), Uses()
    on.request("r1")
    box = outbox(FakeProducer(), uses)
    task = asyncio.create_task(box.run())
    box.put(on.outcome(on.works[0]))
    await until(lambda: bool(uses.writes))
    uses.writes[0][2].set_exception(Fenced("another writes it"))
    with pytest.raises(Fenced):
        await task


# On a real broker


def used(name: str, partition: int = 0) -> RecordUsage:
    on = replicas(1)
    on.request(name)
    live = new_live_request(builders.request(name), partition)
    return RecordUsage(usage_of(live, builders.outcome(on.works[0])), partition)


@asynccontextmanager
async def owner(log: LogSettings, name: str = "router-a") -> AsyncIterator[UsageWriter]:
    """One that has both partitions."""
    writer = UsageWriter(log, Codec(), name)
    await writer.take([0, 1])
    try:
        await writer.begin([0, 1], {("outcomes", p): 0 for p in (0, 1)})
        yield writer
    finally:
        await writer.keep(())


async def committed_usage(log: LogSettings) -> list[tuple[int, int, str]]:
    """Partition, number and request of all that is committed."""
    return sorted([(p, u.number, u.request_id) async for p, u in read_usage(log)])


@pytest.mark.kafka
async def test_usage_numbers_continue_without_gap_under_next_owner(kafka: LogSettings) -> None:
    """What the former owner had not committed is void."""
    async with owner(kafka) as former:
        await asyncio.gather(*(former.write(used(f"a{n}"), None) for n in range(3)))
        await former.write(used("b0", 1), None)
        async with owner(kafka, "router-b") as later:
            late = former.write(used("late"), None)
            with pytest.raises(Fenced):
                await late
            with pytest.raises(Fenced):  # it says no more at all
                await former.write(used("later"), None)
            await later.write(used("a3"), None)
    assert await committed_usage(kafka) == [
        *((0, number, f"a{number}") for number in range(4)),
        (1, 0, "b0"),
    ]


@pytest.mark.kafka
async def test_writer_commits_usage_only_after_its_outcome(kafka: LogSettings) -> None:
    loop = asyncio.get_running_loop()
    async with owner(kafka) as writer:
        coming, failing = loop.create_future(), loop.create_future()
        first = writer.write(used("r0"), coming)
        loop.call_later(3 * usage_module.COMMIT_S, coming.set_result, None)
        await first
        assert coming.done()
        second = writer.write(used("r1"), failing)
        failing.set_exception(OSError("not acknowledged"))
        with pytest.raises(OSError, match="not acknowledged"):
            await second
    assert await committed_usage(kafka) == [(0, 0, "r0")]


@pytest.mark.kafka
async def test_writer_commits_gathered_usage_at_once_after_hurry(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction costs the log about as much as a request."""
    monkeypatch.setattr(usage_module, "COMMIT_S", 3_600.0)
    async with owner(kafka) as writer:
        first = [writer.write(used(f"a{n}"), None) for n in range(3)]
        writer.hurry()
        await asyncio.gather(*first)
        await writer.write(used("a3"), None)
        reader = AssignedReader(kafka, "usage", [0], client_id="test")
        async with reader.reading("earliest"):
            offsets = [record.offset for record in await reader.read_to_end() if record.value]
    assert await committed_usage(kafka) == [(0, number, f"a{number}") for number in range(4)]
    begin = offsets[0]
    assert offsets == [begin, begin + 1, begin + 2, begin + 4]  # the end of one lies between


async def aborted(log: LogSettings, count: int) -> None:
    """Records at the topic's end that nobody committed."""
    transactions = Transactions(log, "usage-0")
    await transactions.start()
    producer = transactions._producer
    assert producer is not None
    await producer.begin_transaction()
    for _ in range(count):
        await producer.send_and_wait(f"{log.topic_prefix}usage", b"void", partition=0)
    await producer.abort_transaction()
    await transactions.stop()


@pytest.mark.kafka
async def test_writer_finds_last_number_behind_aborted_records(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "_LOOK_BACK", 2)
    async with owner(kafka) as writer:
        await asyncio.gather(*(writer.write(used(f"a{n}"), None) for n in range(2)))
    await aborted(kafka, 40)
    async with owner(kafka) as writer:
        await writer.write(used("a2"), None)
    assert await committed_usage(kafka) == [(0, number, f"a{number}") for number in range(3)]


@pytest.mark.kafka
async def test_writer_continues_numbers_behind_foreign_record(kafka: LogSettings) -> None:
    """A foreign record kept every router from its partition."""
    async with owner(kafka) as writer:
        await writer.write(used("a0"), None)
    await produce_batch(kafka, "usage", batch([b"somebody else's", b""]))
    async with owner(kafka) as writer:
        await writer.write(used("a1"), None)
    assert await committed_usage(kafka) == [(0, 0, "a0"), (0, 1, "a1")]


@pytest.mark.kafka
async def test_writer_repeats_no_number_after_log_deletion(kafka: LogSettings) -> None:
    async with owner(kafka) as writer:
        await asyncio.gather(*(writer.write(used(f"a{n}"), None) for n in range(5)))
    place = TopicPartition(f"{kafka.topic_prefix}usage", 0)
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    await admin.delete_records({place: RecordsToDelete(before_offset=-1)})
    await admin.close()
    async with owner(kafka) as writer:
        assert not writer.is_older(0, 0)
        await writer.write(used("next"), None)
    ((_, number, name),) = await committed_usage(kafka)
    assert name == "next" and number >= 5


@pytest.mark.kafka
async def test_first_writer_notes_where_usage_begins(kafka: LogSettings) -> None:
    """Later writers keep that note."""
    for read_to in (7, 9):
        writer = UsageWriter(kafka, Codec(), "router-a")
        await writer.take([0])
        try:
            assert writer.is_older(0, 6)
            assert writer.is_older(0, 7) is (read_to == 7)
            await writer.begin([0], {("outcomes", 0): read_to})
            assert not writer.is_older(0, 7)
        finally:
            await writer.keep(())


@pytest.mark.kafka
async def test_writer_leaves_usage_of_lost_partition_to_next_owner(kafka: LogSettings) -> None:
    async with owner(kafka) as writer:
        waiting = writer.write(used("r0"), asyncio.get_running_loop().create_future())
        await writer.keep([1])
        assert waiting.done()
        await writer.write(used("r1"), None)
        await writer.write(used("r2", 1), None)
    assert await committed_usage(kafka) == [(1, 0, "r2")]
