"""Connect's own JSON converter reads what people write and read as JSON, and a
connector that fails says why."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.platform.connect.connectors import file_sink
from infra.platform.connect.worker import Connect
from schemas.codec import Codec
from schemas.errors import ConfigError, QueueFull
from schemas.records import AnswerPart
from schemas.settings import LogSettings
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import TopicPair
from streams.bridge.records.record import PromptRecord
from streams.log.clients import LogProducer
from streams.log.transactions import OutgoingRecord
from tests.waits import until

pytestmark = [pytest.mark.platform, pytest.mark.kafka]
CODEC = Codec()


@asynccontextmanager
async def writing(kafka: LogSettings) -> AsyncIterator[LogProducer]:
    async with LogProducer(kafka, CODEC, durable=True, client_id="test") as producer:
        yield producer


def prompt(kafka: LogSettings) -> PromptRecord:
    return PromptRecord(
        topic=f"{kafka.topic_prefix}prompts",
        partition=0,
        offset=7,
        timestamp_ms=1,
        key=b'{"id": 7}',
        value=json.dumps({"text": "Why?", "metadata": {"row": 7}}).encode(),
    )


def answers(kafka: LogSettings, form: str) -> list[OutgoingRecord]:
    """An error answer, an empty answer and an answer part, in this format."""
    prefix, prompt_record = kafka.topic_prefix, prompt(kafka)
    pair = TopicPair(
        prompts=prompt_record.topic,
        answers=f"{prefix}answers",
        parts=f"{prefix}answers.parts",
        format=form,
    )
    builder = AnswerBuilder(pair, CODEC)
    part = AnswerPart(
        prompt_topic=prompt_record.topic, prompt_partition=0, prompt_offset=7, request_id="r",
        seq=0, tokens=1, start=0, text="Be",
    )  # fmt: skip
    return [
        builder.sending(prompt_record, builder.error_answer(prompt_record, QueueFull("no room"))),
        builder.empty_answer(prompt_record),
        builder.part(prompt_record, part),
    ]


async def lines_of(file: Path, count: int) -> list[str]:
    def has_them() -> bool:
        return file.exists() and len(file.read_text().splitlines()) >= count

    await until(has_them)
    return file.read_text().splitlines()


@pytest.mark.parametrize("form", ["json", "json_envelope"])
async def test_json_converter_reads_prompts_and_answers(
    kafka: LogSettings, tmp_path: Path, form: str
) -> None:
    prompt_record = prompt(kafka)
    async with writing(kafka) as producer:
        if form == "json":  # a prompt has no schema
            ack = await producer.send_raw(
                prompt_record.topic, prompt_record.value, key=prompt_record.key, partition=0
            )
            await ack
        for answer in answers(kafka, form):
            ack = await producer.send_raw(
                answer.topic,
                answer.value,
                key=answer.key,
                partition=answer.partition,
                headers=answer.headers,
            )
            await ack
    async with Connect(kafka.bootstrap, tmp_path / "connect") as connect:
        out = tmp_path / "out.txt"
        names = ["prompts"] * (form == "json") + ["answers", "answers.parts"]
        topics = [kafka.topic_prefix + name for name in names]
        await connect.run("file", file_sink(topics, str(out), schemas=form == "json_envelope"))
        lines = await lines_of(out, len(names) + 1)
        await connect.check("file")
    text = "\n".join(lines)
    assert ("Why?" in text) == (form == "json")
    assert "no room" in text and "Be" in text
    assert sum(line == "null" for line in lines) == 1  # the empty prompt's


async def test_connect_error_names_connector_failure(kafka: LogSettings, tmp_path: Path) -> None:
    async with writing(kafka) as producer:
        topic = f"{kafka.topic_prefix}answers"
        await (await producer.send_raw(topic, b"{no json", key=b"k", partition=0))
    async with Connect(kafka.bootstrap, tmp_path / "connect") as connect:
        with pytest.raises(ConfigError, match="connector wrong: .*no.such.Connector"):
            await connect.run("wrong", {"connector.class": "no.such.Connector"})
        await connect.run("file", file_sink([topic], str(tmp_path / "out"), schemas=False))

        async def has_failed() -> bool:
            try:
                await connect.check("file")
            except ConfigError as error:
                assert "DataException" in error.message
                return True
            return False

        await until(has_failed)
