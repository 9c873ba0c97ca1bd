"""The log clients and topic admin against a real broker."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import GroupCoordinatorNotAvailableError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, ConfigError, RecordError, RecordTooLarge, TopicError
from schemas.records import Cancellation, CancelReason, Session
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from schemas.topics import TOPICS, partition_of
from streams.log.admin import create_topics, describe_topics, expected_topics, verify_topics
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter
from streams.log.clock import wall_ms
from tests.waits import PATIENCE_S, until

pytestmark = pytest.mark.kafka


def cancellation(number: int) -> Cancellation:
    return Cancellation(
        request_id=f"r{number}",
        session_id=f"s{number}",
        reason=CancelReason.CLIENT_GONE,
        at_ms=number,
    )


async def send(producer: LogProducer, number: int, partition: int = 0) -> int:
    record = cancellation(number)
    ack = await producer.send("cancellations", record, key=record.session_id, partition=partition)
    return int((await ack).offset)


async def test_reader_reads_records_in_order_with_headers(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(kafka, "cancellations", [0, 1], client_id="reader")
    await producer.start()
    await reader.start("latest")
    try:
        for number in range(5):
            await send(producer, number, partition=1)
        records = await reader.read_to_end()
    finally:
        await reader.stop()
        await producer.stop()
    assert [Codec().decode(record.value) for record in records] == [
        cancellation(number) for number in range(5)
    ]
    assert dict(records[0].headers)["ce_type"] == b"trivium.Cancellation"
    assert {record.partition for record in records} == {1}


async def test_reader_fixes_latest_offset_when_start_returns(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=False, client_id="writer")
    reader = AssignedReader(kafka, "cancellations", [0], client_id="reader")
    await producer.start()
    try:
        await send(producer, 1)
        await reader.start("latest")
        await send(producer, 2)
        (record,) = await reader.batch()
        assert Codec().decode(record.value) == cancellation(2)
    finally:
        await reader.stop()
        await producer.stop()


async def test_reader_finds_offsets_by_time(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(kafka, "cancellations", [0, 1], client_id="reader")
    await producer.start()
    await reader.start("earliest")
    try:
        await send(producer, 1)
        assert await reader.offsets_at(0) == {0: 0, 1: 0}
        assert await reader.offsets_at(wall_ms() + 60_000) == {0: 1, 1: 0}
    finally:
        await reader.stop()
        await producer.stop()


async def test_reader_without_position_reads_after_seek(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(kafka, "cancellations", [0, 1], client_id="reader")
    await producer.start()
    await reader.start("nowhere")
    try:
        for number in range(3):
            await send(producer, number)
        assert await reader.batch(timeout_ms=200) == []
        assert await reader.offsets_at(0) == {0: 0, 1: 0}
        await reader.seek({0: 1, 1: 0})
        assert [record.offset for record in await reader.read_to_end()] == [1, 2]
    finally:
        await reader.stop()
        await producer.stop()


async def test_dead_letters_carry_origin_and_error(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(kafka, "requests", [0], client_id="reader")
    dead = AssignedReader(kafka, "requests.dlq", [0], client_id="dead")
    await producer.start()
    await reader.start("earliest")
    await dead.start("earliest")
    try:
        await (
            await producer.send_raw(
                kafka.topic_prefix + "requests", b"garbage", key=b"s1", partition=0
            )
        )
        (record,) = await reader.batch()
        await send_dead_letter(producer, record, RecordError("no marker"))
        (buried,) = await dead.batch()
    finally:
        for client in (reader, dead, producer):
            await client.stop()
    headers = dict(buried.headers)
    assert buried.value == b"garbage"
    assert buried.key == b"s1"
    assert headers["x-dlq-error-class"] == b"RecordError"
    assert headers["x-dlq-error-message"] == b"no marker"
    assert headers["x-dlq-topic"].decode() == kafka.topic_prefix + "requests"
    assert headers["x-dlq-offset"] == b"0"


async def test_dead_letter_is_written_for_record_without_key_and_value() -> None:
    """Other clients may write such a record; this producer refuses to, but must not fail here."""

    class Producer:
        async def send_raw(self, topic: str, value: Any, *, key: Any, **where: Any) -> Any:
            assert not (value is None and key is None)
            letters.append((topic, dict(where["headers"])["x-dlq-error-message"]))
            return asyncio.sleep(0)

    letters: list[Any] = []
    record: Any = SimpleNamespace(
        topic="requests", partition=0, offset=7, timestamp=0, headers=(), key=None, value=None
    )
    await send_dead_letter(Producer(), record, RecordError("found \ud800"))  # type: ignore[arg-type]  # a fake
    assert letters == [("requests.dlq", b"found \\ud800")]


async def test_producer_rejects_record_of_other_topic(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    session = Session(
        session_id="s",
        decode_worker="w",
        worker_epoch=1,
        context_tokens=1,
        turns=1,
        last_used_ms=1,
    )
    with pytest.raises(RecordError, match="topic requests carries Request, found Session"):
        await producer.send("requests", session, key="s", partition=0)
    with pytest.raises(BrokerUnavailable, match="not started"):
        await producer.send("sessions", session, key="s", partition=0)


async def test_reader_commits_positions_that_lag_tools_see(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(
        kafka, "cancellations", [0], client_id="reader", committed_group="workers"
    )
    lag = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap, group_id=kafka.topic_prefix + "workers"
    )
    await producer.start()
    await reader.start("earliest")
    await lag.start()
    try:
        await send(producer, 1)
        await reader.batch()
        coordinator = reader._started._coordinator
        await until(lambda: coordinator.coordinator_id is not None)
        await reader.stop()  # closing commits, to a coordinator that it knows
        partition = TopicPartition(kafka.topic_prefix + "cancellations", 0)
        lag.assign([partition])
        assert await lag.committed(partition) == 1
    finally:
        for client in (reader, producer, lag):
            await client.stop()


async def test_reader_closes_without_group_coordinator(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka alone would retry the commit for ever."""
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(
        kafka, "cancellations", [0], client_id="reader", committed_group="workers"
    )
    reader._answer_s = 0.1  # always waited for

    async def fail_lookup(*_: object) -> None:
        raise GroupCoordinatorNotAvailableError

    await producer.start()
    monkeypatch.setattr(AIOKafkaClient, "coordinator_lookup", fail_lookup)
    try:
        await send(producer, 1)
        await reader.start({0: 0})
        assert len(await reader.batch()) == 1
    finally:
        await reader.stop()
        await producer.stop()
    gc.collect()  # what is left says so now, which is an error here


async def test_create_topics_creates_each_topic_once(kafka: LogSettings) -> None:
    assert await create_topics(kafka) == []
    rows = await describe_topics(kafka)
    assert all(row.fits for row in rows)
    assert len(rows) == 2 * len(TOPICS)


@pytest.mark.parametrize(
    ("copies", "min_insync", "expected"),
    [(1, 0, None), (2, 0, "2"), (3, 0, "2"), (3, 3, "3"), (5, 0, "3")],
)
def test_topics_require_majority_of_replicas_in_sync(
    copies: int, min_insync: int, expected: str | None
) -> None:
    """A record on the leader alone would be lost with it."""
    settings = LogSettings(replication_factor=copies, min_insync_replicas=min_insync)
    for topic in expected_topics(settings).values():
        assert topic.replication_factor == copies
        assert topic.topic_configs.get("min.insync.replicas") == expected


def test_settings_reject_min_insync_replicas_above_replication_factor() -> None:
    with pytest.raises(ConfigError, match="min_insync_replicas: expected at most replication_f"):
        LogSettings(replication_factor=2, min_insync_replicas=3)


async def test_create_topics_error_explains_partition_count_mismatch(kafka: LogSettings) -> None:
    other_settings = replace(kafka, session_partitions=kafka.session_partitions + 1)
    with pytest.raises(TopicError, match="requests: expected 3, found 2.*set them in \\[log\\]"):
        await create_topics(other_settings)


async def test_missing_topics_error_names_create_command(kafka: LogSettings) -> None:
    nowhere = LogSettings(bootstrap=kafka.bootstrap, topic_prefix="nowhere.")
    with pytest.raises(TopicError, match="trivium topics create"):
        await verify_topics(nowhere)


async def test_clients_report_missing_broker_immediately() -> None:
    settings = LogSettings(bootstrap="127.0.0.1:1")
    producer = LogProducer(settings, Codec(), durable=True, client_id="writer")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokerUnavailable, match="no broker at 127.0.0.1:1"):
            await producer.start()
        with pytest.raises(BrokerUnavailable, match="no broker"):
            await create_topics(settings)


STARTS: dict[str, Callable[[LogSettings], Coroutine[Any, Any, object]]] = {
    "reader": lambda log: AssignedReader(log, "fleet", [0], client_id="r").start("latest"),
    "producer": lambda log: LogProducer(log, Codec(), durable=True, client_id="w").start(),
    "admin": describe_topics,
}


@pytest.mark.parametrize("client", STARTS)
async def test_cancelled_client_start_leaves_no_connection_open(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    send, request_sent = AIOKafkaConnection.send, asyncio.Event()

    def asking(*args: Any, **options: Any) -> Any:
        request_sent.set()
        return send(*args, **options)

    monkeypatch.setattr(AIOKafkaConnection, "send", asking)
    task = asyncio.create_task(STARTS[client](kafka))
    await request_sent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()  # what is left says so now, which is an error here


def test_partition_of_is_stable_across_processes() -> None:
    assert [partition_of(f"session-{n}", 4) for n in range(6)] == [0, 2, 0, 2, 1, 3]


async def test_producer_rejects_oversized_record_and_largest_is_dead_lettered(
    kafka: LogSettings,
) -> None:
    """The largest record still gets a dead letter, and the broker takes what the client takes."""
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    reader = AssignedReader(kafka, "requests", [0], client_id="reader")
    await producer.start()
    await reader.start("latest")
    dead = AssignedReader(kafka, "requests.dlq", [0], client_id="buried")
    try:
        topic, size, fits = kafka.topic_prefix + "requests", RECORD_BYTES_MAX, None
        while fits is None:
            try:
                fits = await (await producer.send_raw(topic, bytes(size), key=b"k", partition=0))
            except RecordTooLarge as error:
                assert "not sent" in str(error)
                size -= 16
        (record,) = await reader.batch()
        await dead.start("latest")
        await send_dead_letter(producer, record, RecordError("x" * 100_000))
        (buried,) = await dead.batch()
        assert buried.value is None
        assert dict(buried.headers)["x-dlq-offset"] == b"%d" % record.offset
    finally:
        await dead.stop()
        await reader.stop()
        await producer.stop()


async def test_reader_and_producer_contexts_stop_at_exit_or_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    async def start(_self: object, at: object = "now") -> None:
        calls.append(at)

    async def stop(_self: object) -> None:
        calls.append("stopped")

    for kind in (AssignedReader, LogProducer):
        monkeypatch.setattr(kind, "start", start)
        monkeypatch.setattr(kind, "stop", stop)
    reader = AssignedReader(LogSettings(), "fleet", [0], client_id="r")
    with pytest.raises(ZeroDivisionError):
        async with reader.reading("latest") as reading:
            assert reading is reader and calls == ["latest"]
            raise ZeroDivisionError
    making = LogProducer(LogSettings(), Codec(), durable=True, client_id="p")
    async with making as producer:
        assert producer is making
    assert calls == ["latest", "stopped", "now", "stopped"]
