"""Kafka Streams writes prompts and reads answers, exactly once."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from infra.processes.supervisor import ProcessSpec, SupervisedProcess
from schemas.settings import LogSettings
from tests.waits import until

ROOT = Path(__file__).parents[4]
LIBS = ROOT / "build" / "java" / "libs"
TICKETS = 20
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.platform,
    pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK, Java 17 or newer"),
    pytest.mark.skipif(not LIBS.exists(), reason="needs the jars of `make test-platform`"),
]


@asynccontextmanager
async def topics(log: LogSettings) -> AsyncIterator[None]:
    """The ticket and label topics, deleted at the end."""
    names = [f"{log.topic_prefix}{name}" for name in ("tickets", "labels")]
    admin = AIOKafkaAdminClient(bootstrap_servers=log.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, 1) for name in names])
    try:
        yield
    finally:
        await admin.delete_topics(names)
        await admin.close()


@asynccontextmanager
async def tickets(log: LogSettings, folder: Path) -> AsyncIterator[SupervisedProcess]:
    source = ROOT / "infra" / "platform" / "java" / "Tickets.java"
    words = (str(source), log.bootstrap, str(folder / "state"), log.topic_prefix)
    command = ("java", "-Xmx256m", "-cp", f"{LIBS}/*", *words)
    spec = ProcessSpec(
        name="tickets", command=command, log_file=folder / "log" / "tickets.log", restart=False
    )
    process = SupervisedProcess(spec)
    process.start()
    try:
        yield process
    finally:
        await process.stop()


async def values(log: LogSettings, topic: str, count: int) -> list[tuple[str, str]]:
    """Keys and values of the topic, once at least `count` have arrived."""
    consumer = AIOKafkaConsumer(
        log.topic_prefix + topic,
        bootstrap_servers=log.bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    pairs: list[tuple[str, str]] = []

    async def enough() -> bool:
        for records in (await consumer.getmany(timeout_ms=200)).values():
            pairs.extend((r.key.decode(), r.value.decode()) for r in records)
        return len(pairs) >= count

    try:
        await until(enough)
    finally:
        await consumer.stop()
    return pairs


async def test_kafka_streams_turns_tickets_into_prompts_and_answers_into_labels(
    kafka: LogSettings, tmp_path: Path
) -> None:
    keys = [f"t{number}" for number in range(TICKETS)]
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
    await producer.start()
    prefix = kafka.topic_prefix
    try:
        async with topics(kafka), tickets(kafka, tmp_path) as process:
            for key in keys:
                await producer.send_and_wait(f"{prefix}tickets", b"the lid is loose", key.encode())
            prompts = await values(kafka, "prompts", TICKETS)
            assert sorted(key for key, _ in prompts) == sorted(keys), process.tail()
            first = json.loads(prompts[0][1])
            assert "the lid is loose" in first["text"]
            for key in keys:
                answer = b'{"text": "Jar", "error_code": null}'
                if key == "t0":
                    answer = b'{"text": null, "error_code": "overloaded"}'
                await producer.send_and_wait(f"{prefix}answers", answer, key.encode())
            labels = dict(await values(kafka, "labels", TICKETS))
            assert labels == dict.fromkeys(keys, "Jar") | {"t0": "unknown"}
    finally:
        await producer.stop()
