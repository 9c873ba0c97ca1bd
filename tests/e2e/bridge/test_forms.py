"""Prompts in every form, right and wrong, over a broker: each has its answer in the form that is
due, and what is wrong a dead letter besides."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from schemas.codec import Codec
from schemas.records import Answer, Prompt
from schemas.settings import LogSettings
from streams.bridge.config import BridgeSettings, TopicPair
from streams.bridge.prompts import VALUE_BYTES_MAX
from streams.log.admin import expected_topics
from tests.e2e.harness import sim_settings, stack
from tests.streams.log.reading.odd_batches import CODECS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
CODEC = Codec()
SCHEMA = '{"type": "object", "required": ["stars"], "properties": {"stars": {"type": "integer"}}}'
TEXT = [("content-type", b"text/plain")]
RIGHT: dict[str, Any] = {
    "json": b'{"text": "Why?", "max_tokens": 3, "metadata": {"n": 1}}',
    "avro": CODEC.encode(Prompt(text="Why?", max_tokens=3, metadata='{"n":1}')),
    "body": b'{"body": {"prompt": "Why?", "max_tokens": 3}, "metadata": {"n": 1}}',
    "empty": None,
    "null": b"null",
}
WRONG = {
    "no text": b"{}",
    "unknown": b'{"text": "Why?", "colour": 1}',
    "type": b'{"text": 7}',
    "model": b'{"text": "Why?", "model": "other"}',
    "latin": b'{"text": "\xe9"}',
    "damaged": b"\xc3\x01 damaged bytes",
    "schema id": b"\x00\x00\x00\x00\x07x",
    "huge": b"{" + b" " * VALUE_BYTES_MAX,
}


async def produce(
    log: LogSettings, topic: str, values: dict[str, Any], headers: Sequence[Any] = ()
) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=log.bootstrap, max_request_size=8 << 20)
    await producer.start()
    try:
        for key, value in values.items():
            await producer.send_and_wait(topic, value, key=key.encode(), headers=list(headers))
    finally:
        await producer.stop()


async def read(log: LogSettings, topic: str, partitions: int, count: int) -> dict[str, Any]:
    """So many committed records, by key."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=log.bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    committed_records: list[ConsumerRecord] = []
    try:
        consumer.assign([TopicPartition(topic, number) for number in range(partitions)])
        while len(committed_records) < count:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                committed_records += records
    finally:
        await consumer.stop()
    assert len(committed_records) == count
    return {record.key.decode(): record for record in committed_records}


async def test_bridge_answers_prompts_in_every_form(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    log = await kafka_with(gateway_partitions=4)
    prompts, rows = f"{log.topic_prefix}prompts", f"{log.topic_prefix}rows"
    pair = TopicPair(
        prompts=rows,
        answers=f"{rows}.rated",
        template="How many stars: {text}",
        metadata=("id",),
        schema=SCHEMA,
        max_tokens=64,
        fallback='{"stars": 0}',
        format="json_envelope",
    )
    small = TopicPair(prompts=f"{rows}.small", answers=f"{rows}.small.answers", format="avro")
    await take_at_most(log, small.answers, 1_000, is_new=True)
    settings = replace(sim_settings(log), bridge=BridgeSettings(pairs=(pair, small)))
    await compress_all(log)
    await produce(log, prompts, {**RIGHT, **WRONG})
    await produce(log, prompts, {"text": b"Why?"}, TEXT)
    async with stack(settings, tmp_path, replica=1, bridges=1):
        await produce(log, rows, {"good": b'{"id": 1, "text": "Nice."}', "bad": b'{"id": 2}'})
        count = log.prompt_partitions
        answers = await read(log, f"{log.topic_prefix}answers", count, len(RIGHT | WRONG) + 1)
        rated = await read(log, pair.answers, count, 2)
        letters = await read(log, f"{prompts}.dlq", 1, len(WRONG))
        (row_letter,) = (await read(log, f"{rows}.dlq", 1, 1)).values()
        await check_large(log, small)
    assert answers["empty"].value is answers["null"].value is None
    for key in ("json", "body", "text"):
        answer = json.loads(answers[key].value)
        assert answer["text"] and answer["error_code"] is None, key
        assert answer["metadata"] == (None if key == "text" else {"n": 1})
    answer = CODEC.decode(answers["avro"].value)
    assert isinstance(answer, Answer) and answer.text and answer.metadata == '{"n":1}'
    check_wrong(answers, letters)
    check_rated(rated)
    assert (
        row_letter.key == b"bad"
        and dict(row_letter.headers)["x-dlq-error-code"] == b"invalid_request"
    )


@asynccontextmanager
async def admin_client(log: LogSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=log.bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def take_at_most(log: LogSettings, topic: str, size: int, *, is_new: bool = False) -> None:
    configs = {"max.message.bytes": str(size)}
    async with admin_client(log) as admin:
        if is_new:
            topics = [NewTopic(topic, log.prompt_partitions, 1, topic_configs=configs)]
            await admin.create_topics(topics)
        else:
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs)])


async def compress_all(log: LogSettings) -> None:
    """Every topic by one of the codecs, as clusters do by a setting of theirs."""
    topic_codecs = zip(expected_topics(log).items(), cycle(CODECS[1:]), strict=False)
    resources = [
        ConfigResource(
            ConfigResourceType.TOPIC, name, {**topic.topic_configs, "compression.type": codec}
        )
        for (name, topic), codec in topic_codecs
    ]
    async with admin_client(log) as admin:
        await admin.alter_configs(resources)


async def check_large(log: LogSettings, pair: TopicPair) -> None:
    """An answer larger than its topic takes is an error, known before it is sent or by the broker's
    refusal; those beside it come through."""
    count = log.prompt_partitions
    long = b'{"text": "Why?", "max_tokens": 500, "priority": "interactive"}'
    short = b'{"text": "Why?", "max_tokens": 3, "priority": "interactive"}'
    await produce(log, pair.prompts, {"known": long, "a": short})
    await read(log, pair.answers, count, 2)
    await take_at_most(log, pair.answers, 700)
    middle = long.replace(b"500", b"150")
    await produce(log, pair.prompts, {"refused": middle, "b": short, "c": short, "d": short})
    read_answers = await read(log, pair.answers, count, 6)
    letters = await read(log, f"{pair.prompts}.dlq", 1, 2)
    codes = {key: CODEC.decode(record.value).error_code for key, record in read_answers.items()}
    large = dict.fromkeys(("known", "refused"), "record_too_large")
    assert codes == {**large, **dict.fromkeys("abcd")}
    assert {key: letter.value for key, letter in letters.items()} == {
        "known": long,
        "refused": middle,
    }
    await take_at_most(log, pair.answers, 1 << 20)
    await produce(log, pair.prompts, {"larger": long})
    larger = (await read(log, pair.answers, count, 7))["larger"]
    assert CODEC.decode(larger.value).error_code is None, "it takes more by now"


def check_wrong(answers: dict[str, Any], letters: dict[str, Any]) -> None:
    """An error as the answer, in the prompt's form, and the prompt as it came."""
    assert letters.keys() == WRONG.keys()
    for key, value in WRONG.items():
        answer, letter = answers[key], letters[key]
        is_avro = dict(answer.headers)["content-type"] == b"avro/binary"
        assert is_avro == (key in ("damaged", "schema id"))
        if is_avro:
            code = CODEC.decode(answer.value).error_code
        else:
            code = json.loads(answer.value)["error_code"]
        assert code and letter.value == value, key
        assert dict(letter.headers)["x-dlq-error-code"].decode() == code


def check_rated(rated: dict[str, Any]) -> None:
    """With its schema, as Connect reads it; the fallback where the template misses a field."""
    good, bad = (json.loads(rated[key].value) for key in ("good", "bad"))
    assert good["schema"] == bad["schema"] and good["schema"]["type"] == "struct"
    assert isinstance(json.loads(good["payload"]["parsed"])["stars"], int)
    assert json.loads(good["payload"]["metadata"]) == {"id": 1}
    assert (bad["payload"]["text"], bad["payload"]["fallback"]) == ('{"stars": 0}', True)
    assert "expected a field text" in bad["payload"]["error_message"]
