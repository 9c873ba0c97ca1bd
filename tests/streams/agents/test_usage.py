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
from schemas.log.clients import Ack, AssignedReader
from schemas.log.connecting import client_options
from schemas.log.faust.receipts import Receipts
from schemas.log.transactions import Transactions
from schemas.records import OutcomeKind
from schemas.settings import LogSettings
from streams.agents import usage as usage_module
from streams.agents.outbox import Outbox
from streams.agents.usage import UsageWriter
from streams.core.effects import Decide, Dispatch, Effect, End, RecordUsage
from streams.core.events import Tick
from streams.core.requests.live import new_live_request
from streams.core.requests.usage import usage_of
from tests.schemas.log.reading.odd_batches import batch, produce_batch
from tests.streams import builders
from tests.streams.agents.fakes import FakeProducer, standing
from tests.streams.core.router_setups import replicas
from tests.waiting import until

PLACE = ("requests", 0)


class Uses:
    """Writes when the test says so."""

    def __init__(self) -> None:
        self.taken: list[tuple[RecordUsage, Ack | None, Ack]] = []

    def take(self, use: RecordUsage, outcome: Ack | None) -> Ack:
        told: Ack = asyncio.get_running_loop().create_future()
        self.taken.append((use, outcome, told))
        return told


def outbox(producer: FakeProducer, uses: Uses) -> Outbox:
    asked: list[Any] = []
    return Outbox(producer, "test.", "router-a", 100, standing, asked.append, uses.take)  # type: ignore[arg-type]  # a fake


def expired() -> list[Effect]:
    """What follows where a worker has not ended a request in time."""
    on = replicas(1, deadline_grace_ms=100)
    on.request("r1", deadline_ms=on.now_ms + 100)
    on.now_ms += 300
    return on.apply(Tick())


async def test_usage_waits_for_its_outcome_and_holds_up_nothing() -> None:
    """Marks and receipts wait until it is committed, orders do not."""
    effects = expired()
    assert {type(each) for each in effects} == {Decide, Dispatch, End, RecordUsage}
    producer, uses = FakeProducer(at_once=False), Uses()
    box, receipts, acked = outbox(producer, uses), Receipts(), list[str]()
    task = asyncio.create_task(box.run())
    receipt = receipts.open(PLACE, functools.partial(acked.append, "r"), len(effects))
    box.put(effects, receipt)
    await until(lambda: bool(uses.taken))
    ((use, outcome, told),) = uses.taken
    topics = [topic for topic, *_ in producer.sent]
    assert outcome is producer.acks[topics.index("outcomes")]
    assert use.usage.kind is OutcomeKind.EXPIRED
    for ack in producer.acks:
        ack.set_result(None)
    await until(lambda: len(producer.acks) == 4)  # the void order
    producer.acks[-1].set_result(None)
    await until(lambda: box.ending == {"r1": 1})
    assert acked == []
    told.set_result(None)
    await box.drain()
    assert not box.ending and acked == ["r"]
    task.cancel()


async def test_usage_that_cannot_be_written_ends_the_outbox() -> None:
    on, uses = replicas(1), Uses()
    on.request("r1")
    box = outbox(FakeProducer(), uses)
    task = asyncio.create_task(box.run())
    box.put(on.outcome(on.works[0]))
    await until(lambda: bool(uses.taken))
    uses.taken[0][2].set_exception(Fenced("another writes it"))
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


async def told(log: LogSettings) -> list[tuple[int, int, str]]:
    """Partition, number and request of all that is committed."""
    return sorted([(p, u.number, u.request_id) async for p, u in read_usage(log)])


@pytest.mark.kafka
async def test_numbers_go_on_without_a_gap_from_one_owner_to_the_next(kafka: LogSettings) -> None:
    """What the last one had not committed is void."""
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
    assert await told(kafka) == [
        *((0, number, f"a{number}") for number in range(4)),
        (1, 0, "b0"),
    ]


@pytest.mark.kafka
async def test_nothing_is_told_of_an_outcome_that_is_not_in_the_log(kafka: LogSettings) -> None:
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
    assert await told(kafka) == [(0, 0, "r0")]


@pytest.mark.kafka
async def test_what_ends_meanwhile_is_one_transaction_and_whoever_waits_has_it_at_once(
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
            offsets = [each.offset for each in await reader.read_to_end() if each.value]
    assert await told(kafka) == [(0, number, f"a{number}") for number in range(4)]
    begin = offsets[0]
    assert offsets == [begin, begin + 1, begin + 2, begin + 4]  # the end of one lies between


async def aborted(log: LogSettings, count: int) -> None:
    """Records at the topic's end that nobody committed."""
    lost = Transactions(log, "usage-0")
    await lost.start()
    producer = lost._producer
    assert producer is not None
    await producer.begin_transaction()
    for _ in range(count):
        await producer.send_and_wait(f"{log.topic_prefix}usage", b"void", partition=0)
    await producer.abort_transaction()
    await lost.stop()


@pytest.mark.kafka
async def test_the_last_number_is_found_behind_whatever_was_never_committed(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "_LOOK_BACK", 2)
    async with owner(kafka) as writer:
        await asyncio.gather(*(writer.write(used(f"a{n}"), None) for n in range(2)))
    await aborted(kafka, 40)
    async with owner(kafka) as writer:
        await writer.write(used("a2"), None)
    assert await told(kafka) == [(0, number, f"a{number}") for number in range(3)]


@pytest.mark.kafka
async def test_numbers_go_on_behind_what_nobody_can_read(kafka: LogSettings) -> None:
    """A record of somebody else's kept every router from its partition."""
    async with owner(kafka) as writer:
        await writer.write(used("a0"), None)
    await produce_batch(kafka, "usage", batch([b"somebody else's", b""]))
    async with owner(kafka) as writer:
        await writer.write(used("a1"), None)
    assert await told(kafka) == [(0, 0, "a0"), (0, 1, "a1")]


@pytest.mark.kafka
async def test_no_number_comes_twice_where_the_log_has_dropped_them(kafka: LogSettings) -> None:
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
    ((_, number, name),) = await told(kafka)
    assert name == "next" and number >= 5


@pytest.mark.kafka
async def test_what_ended_before_usage_was_told_is_not(kafka: LogSettings) -> None:
    """Whoever comes first notes where it begins, and that stays."""
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
async def test_what_was_given_up_is_left_to_whoever_has_it(kafka: LogSettings) -> None:
    async with owner(kafka) as writer:
        waiting = writer.write(used("r0"), asyncio.get_running_loop().create_future())
        await writer.keep([1])
        assert waiting.done()
        await writer.write(used("r1"), None)
        await writer.write(used("r2", 1), None)
    assert await told(kafka) == [(1, 0, "r2")]
