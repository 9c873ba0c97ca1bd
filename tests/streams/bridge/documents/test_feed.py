"""Rows of a topic become documents on a real broker: in order, once each, whoever does it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from schemas.codec import Codec
from schemas.errors import Fenced
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from streams.bridge.config import DocumentSource
from streams.bridge.documents.feed import _Feed, feed_documents, feed_group
from streams.log.admin import create_extra_topics
from streams.log.clients import AssignedReader, LogProducer
from streams.log.connecting import client_options
from streams.log.transactions import Transactions, committed_offsets
from tests.waits import until

pytestmark = pytest.mark.kafka
CODEC = Codec()
Row = tuple[str, dict[str, Any] | bytes | None]


def source(kafka: LogSettings) -> DocumentSource:
    return DocumentSource(
        topic=f"{kafka.topic_prefix}rows", collection="handbook", text="{body}", metadata=("n",)
    )


@asynccontextmanager
async def feeding(kafka: LogSettings, *names: str) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(feed_documents(kafka, [source(kafka)], CODEC, name)) for name in names
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def write(kafka: LogSettings, *rows: Row, partition: int = 0) -> None:
    """Write rows one after the other, as a change stream does."""
    topic = source(kafka).topic
    await create_extra_topics(kafka, {topic: 3_600_000})
    async with LogProducer(kafka, CODEC, durable=True, client_id="database") as producer:
        for name, row in rows:
            key = json.dumps({"id": name}).encode()
            value = json.dumps(row).encode() if isinstance(row, dict) else row
            await (await producer.send_raw(topic, value, key=key, partition=partition))


async def read(kafka: LogSettings, topic: str, partitions: int) -> list[ConsumerRecord]:
    reader = AssignedReader(
        kafka, topic, range(partitions), client_id="reader", committed_only=True
    )
    async with reader.reading("earliest"):
        return [record async for record in reader.by_time(await reader.end_offsets())]


async def documents(kafka: LogSettings) -> list[tuple[str, str | None]]:
    pairs = []
    for record in await read(kafka, "documents", kafka.document_partitions):
        key = record.key.decode()
        assert record.partition == partition_of(key, kafka.document_partitions)
        text = CODEC.decode(record.value).text if record.value else None
        pairs.append((key, text))
    return pairs


def has(kafka: LogSettings, condition: Callable[[list[tuple[str, str | None]]], bool]) -> Any:
    async def looks() -> bool:
        return condition(await documents(kafka))

    return looks


async def alter(kafka: LogSettings, topic: str, config: dict[str, str]) -> None:
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, config)])
    finally:
        await admin.close()


def body(text: str) -> dict[str, Any]:
    return {"body": text, "n": 1}


KEY = document_key("handbook", "a")


async def test_feed_writes_documents_in_row_order(kafka: LogSettings) -> None:
    """New, edited and deleted rows follow in order; an invalid row is dead-lettered."""
    await write(kafka, ("a", body("one")), ("a", b"{"), ("a", body("two")), ("b", body("other")))
    async with feeding(kafka, "bridge-0"):
        await write(kafka, ("a", b"null"), ("b", None))
        await until(has(kafka, lambda pairs: len(pairs) == 5))
    pairs = await documents(kafka)
    assert [text for key, text in pairs if key == KEY] == ["one", "two", None]
    assert [text for key, text in pairs if key != KEY] == ["other", None]
    (letter,) = await read(kafka, "rows.dlq", 1)
    assert letter.value == b"{"
    headers = dict(letter.headers)
    assert headers["x-dlq-offset"] == b"1"
    assert b"expected a JSON object" in headers["x-dlq-error-message"]


async def test_feed_dead_letters_row_refused_by_topic(kafka: LogSettings) -> None:
    """The rows beside it become documents, and the bridge keeps running."""
    await write(kafka, ("a", body("one")), ("b", body("x" * 5_000)), ("a", body("two")))
    for topic in ("documents", "rows.dlq"):
        full, config = kafka.topic_prefix + topic, {"max.message.bytes": "3000"}
        await alter(kafka, full, config)
    async with feeding(kafka, "bridge-0"):
        await until(has(kafka, lambda pairs: len(pairs) == 2))
    assert await documents(kafka) == [(KEY, "one"), (KEY, "two")]
    (letter,) = await read(kafka, "rows.dlq", 1)
    headers = dict(letter.headers)
    assert (letter.value, headers["x-dlq-offset"]) == (None, b"1")
    assert headers["x-dlq-error-class"] == b"RecordTooLarge"


async def test_feed_resumes_from_committed_offset(kafka: LogSettings) -> None:
    await write(kafka, ("a", body("one")))
    async with feeding(kafka, "bridge-0"):
        await until(has(kafka, lambda pairs: len(pairs) == 1))
    await write(kafka, ("a", body("two")))
    async with feeding(kafka, "bridge-1"):
        await until(has(kafka, lambda pairs: pairs[-1] == (KEY, "two")))
    assert await documents(kafka) == [(KEY, "one"), (KEY, "two")]
    place = (source(kafka).topic, 0)
    assert (await committed_offsets(kafka, feed_group(kafka), [place]))[place].offset >= 2


async def test_feed_restarts_after_fencing_without_duplicates(kafka: LogSettings) -> None:
    """After another process took the partition, the next row is written once."""
    await write(kafka, ("a", body("one")))
    async with feeding(kafka, "bridge-0"):
        await until(has(kafka, lambda pairs: len(pairs) == 1))
        rival = Transactions(kafka, f"documents-{source(kafka).topic}-0")
        await rival.start()
        await rival.stop()
        await write(kafka, ("a", body("two")))
        await until(has(kafka, lambda pairs: pairs[-1] == (KEY, "two")))
    assert await documents(kafka) == [(KEY, "one"), (KEY, "two")]


async def test_feed_writes_nothing_after_successor_takes_partition(kafka: LogSettings) -> None:
    """The successor skips finished rows, and the fenced feed cannot write an older one."""
    await write(kafka, ("a", body("one")), ("a", body("two")))
    topic = source(kafka).topic
    old, new = await read(kafka, topic.removeprefix(kafka.topic_prefix), 1)
    place = TopicPartition(topic, 0)
    former, successor = (_Feed(kafka, [source(kafka)], CODEC, name) for name in ("f", "s"))
    try:
        await former._write(place, [old])
        await successor._write(place, [old, new])
        with pytest.raises(Fenced):
            await former._write(place, [old])
        assert await documents(kafka) == [(KEY, "one"), (KEY, "two")]
    finally:
        await former._stop_writers()
        await successor._stop_writers()


async def test_feeds_share_partitions_without_duplicates(kafka: LogSettings) -> None:
    for partition in range(kafka.prompt_partitions):
        rows = [(f"{partition}-{n}", body(str(n))) for n in range(20)]
        await write(kafka, *rows, partition=partition)
    expected = 20 * kafka.prompt_partitions
    async with feeding(kafka, "bridge-0"):
        async with feeding(kafka, "bridge-1"):
            await until(has(kafka, lambda pairs: len(pairs) >= expected))
            await write(kafka, ("late", body("late")), partition=1)
            await until(has(kafka, lambda pairs: len(pairs) > expected))
        await write(kafka, ("later", body("later")), partition=0)
        await until(has(kafka, lambda pairs: len(pairs) > expected + 1))
    pairs = await documents(kafka)
    assert len(pairs) == len(set(pairs)) == expected + 2
