"""From where a takeover reads: everything that lives, however old, and little else."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from schemas.codec import Codec
from schemas.errors import ConfigError
from schemas.records import OutcomeKind, Session
from schemas.settings import LogSettings
from schemas.topics import HOUR_MS, REBUILT_FROM, TOPICS, live_ms_max
from streams.agents.app import group_id, marks_group
from streams.agents.lifecycle import keep_marks
from streams.agents.router import Marks
from streams.agents.takeover import _committed, past_records
from streams.config import RouterSettings
from streams.core.effects import End
from streams.core.events import CancellationArrived
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.connecting import client_options
from tests.streams import builders
from tests.streams.agents.fakes import FakeEvent, router_with_partition
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import replicas
from tests.waits import run

MINUTE_MS = 60_000


def test_marks_oldest_returns_first_live_request() -> None:
    live = {"r0", "r2", "r3"}
    marks = Marks(lambda request_id: request_id in live)
    for number in range(4):
        marks.add(0, 10 + number, f"r{number}")
    assert marks.oldest({0: 14, 1: 7}) == {0: 10, 1: 7}
    live -= {"r0", "r3"}
    assert marks.oldest({0: 14}) == {0: 12}
    live.clear()
    assert marks.oldest({0: 14}) == {0: 14}
    marks.add(0, 14, "r4")
    live.add("r4")
    marks.forget(0)
    assert marks.oldest({0: 15}) == {0: 15}


def test_marks_drop_offsets_of_ended_requests() -> None:
    marks = Marks(lambda request_id: request_id == "r0")
    for number in range(10_000):
        marks.add(0, number, f"r{number}")
    assert len(marks._arrived[0]) < 2_000
    assert marks.oldest({0: 10_000}) == {0: 0}


def test_mark_stays_at_request_until_its_outcome_is_written() -> None:
    """A mark that moved past an unwritten outcome would lose it with the router."""

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        partitions.group.next_offsets["requests", 0] = 0
        request = builders.request("r1", deadline_ms=wall_ms() + MINUTE_MS)
        await partitions.process.take(
            "requests", FakeEvent(process.codec.encode(request), offset=5)
        )
        assert partitions.marks() == {0: 5}
        event = CancellationArrived(builders.cancellation("r1"), PARTITION)
        effects = process.apply(event, "cancellations", 0, 0)
        assert any(isinstance(effect, End) for effect in effects)
        process.outbox.put(effects)
        assert not process.router.view() and partitions.marks() == {0: 5}
        process.outbox.ending.clear()
        assert partitions.marks() == {0: 6}

    run(main())


def test_retention_of_rebuilt_topics_exceeds_request_lifetime() -> None:
    assert all(TOPICS[name].retention_ms > live_ms_max() for name in REBUILT_FROM)
    with pytest.raises(ConfigError, match=r"router\.session_ttl_ms: expected at most 82800000"):
        RouterSettings(session_ttl_ms=24 * HOUR_MS)


def test_sessions_topic_compacts_within_ten_minutes() -> None:
    """A rebuild reads the sessions and not an hour's worth of their changes."""
    config = TOPICS["sessions"].config
    assert int(config["segment.ms"]) <= 600_000 and int(config["delete.retention.ms"]) <= 600_000
    assert TOPICS["sessions"].cleanup == "compact,delete"


async def write(producer: LogProducer, topic: str, record: Any, at_ms: int) -> None:
    """A record as of then."""
    assert producer._producer is not None
    full = producer._settings.topic_prefix + topic
    value = producer._codec.encode(record)
    await producer._producer.send_and_wait(
        full, value, key=b"k", partition=PARTITION, timestamp_ms=at_ms
    )


async def commit(log: LogSettings, group: str, offset: int) -> None:
    place = TopicPartition(f"{log.topic_prefix}requests", PARTITION)
    consumer = AIOKafkaConsumer(**client_options(log), group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([place])
        consumer.pause(place)
        await consumer.commit({place: offset})
    finally:
        await consumer.stop()


async def names(log: LogSettings) -> list[str]:
    """What a takeover reads, by topic and id."""
    codec, lines = Codec(), []
    stream = past_records(log, [PARTITION], session_ttl_ms=HOUR_MS, client_id="t", next_offsets={})
    async with aclosing(stream) as records:
        async for topic, record in records:
            read = codec.decode(record.value)
            name = read.session_id if isinstance(read, Session) else read.request_id
            lines.append(f"{topic} {name}")
    return lines


@pytest.mark.kafka
def test_past_records_start_at_mark_and_include_old_live_requests(
    kafka: LogSettings,
) -> None:
    """The old request is half an hour old, and Faust's group has committed it."""
    on = replicas(1, window=9)
    now_ms, times = wall_ms(), {"ended": 50, "old": 30, "young": 1}
    for request_id in times:
        on.request(request_id)
    works = {work.request_id: work for work in on.works}

    async def main() -> None:
        producer = LogProducer(kafka, Codec(), durable=True, client_id="test")
        await producer.start()
        try:
            for decision in on.decisions:
                at_ms = now_ms - times[decision.request_id] * MINUTE_MS
                await write(producer, "requests", on.accepted[decision.request_id], at_ms)
                await write(producer, "decisions", decision, at_ms)
            outcome = builders.outcome(works["ended"], kind=OutcomeKind.COMPLETED)
            await write(producer, "outcomes", outcome, now_ms - 49 * MINUTE_MS)
            for name, minutes in (("forgotten", 90), ("known", 50)):
                session = Session(
                    session_id=name,
                    decode_worker="x0",
                    worker_epoch=1,
                    context_tokens=9,
                    turns=1,
                    last_used_ms=0,
                )
                await write(producer, "sessions", session, now_ms - minutes * MINUTE_MS)
        finally:
            await producer.stop()
        await commit(kafka, group_id(kafka), 3)  # Faust's: all are placed
        everything = await names(kafka)
        assert {name for name in everything if "ended" in name} == {
            *("outcomes ended", "decisions ended", "requests ended")
        }
        await commit(kafka, marks_group(kafka), 1)
        assert await names(kafka) == [
            *("sessions known", "decisions old", "decisions young"),
            *("requests old", "requests young"),
        ]

    run(main())


@pytest.mark.kafka
def test_keep_marks_commits_current_marks(kafka: LogSettings) -> None:
    class Process:
        at = {0: 7, 1: 3}

        def marks(self) -> dict[int, int]:
            return dict(self.at)

    async def committed() -> dict[int, int]:
        committed = await _committed(kafka, marks_group(kafka), [0, 1])
        return {place[1]: at for place, at in committed.items() if place[0] == "requests"}

    async def main() -> None:
        process = Process()
        task = asyncio.create_task(keep_marks(kafka, process.marks))
        for at in ({0: 7, 1: 3}, {0: 9, 1: 3}):
            process.at = at
            while await committed() != at:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    run(main())
