"""Flink SQL over the topics, in one JVM with its mini-cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from infra.platform.flink.jobs import LIBS, SqlJob, check_jars, script
from schemas.codec import full_schema
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.log.registry import make_codec
from tests.schemas.examples import example
from tests.streams.log.registry_stub import running_registry

platform = [
    pytest.mark.kafka,
    pytest.mark.platform,
    pytest.mark.skipif(not LIBS.exists(), reason="needs the jars of `make test-platform`"),
]


def test_sql_script_escapes_quotes_in_values() -> None:
    text = script("tables.sql", bootstrap="b:1", prefix="it's.")
    assert "'it''s.prompts'" in text
    assert "${" not in text


def test_jar_check_reports_missing_jars(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected"):
        check_jars(tmp_path)


@asynccontextmanager
async def running(text: str, folder: Path) -> AsyncIterator[SqlJob]:
    job = SqlJob(text, folder, heap_mb=512)
    job.start()
    try:
        yield job
    finally:
        await job.stop()


async def send(log: LogSettings, topic: str, values: list[bytes]) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=log.bootstrap)
    await producer.start()
    for value in values:
        await producer.send_and_wait(log.topic_prefix + topic, value, b"k", partition=0)
    await producer.stop()


class TestJobs:
    pytestmark = platform

    async def test_flink_writes_prompts_and_reads_answers(
        self, kafka: LogSettings, tmp_path: Path
    ) -> None:
        log = {"bootstrap": kafka.bootstrap, "prefix": kafka.topic_prefix}
        await send(kafka, "answers", [b'{"prompt_partition": 0, "prompt_offset": 7, "text": "Si"}'])
        queries = (
            "\nINSERT INTO prompts VALUES ('r1', 'Who?', 8), ('r2', 'Where?', CAST(NULL AS INT));\n"
            "SELECT id, prompt_offset, `text`, error_code FROM answers"
            " /*+ OPTIONS('scan.bounded.mode' = 'latest-offset') */;\n"
            "SELECT id, `text`, max_tokens FROM prompts"
            " /*+ OPTIONS('scan.bounded.mode' = 'latest-offset') */;\n"
        )
        async with running(script("tables.sql", **log) + queries, tmp_path) as job:
            assert await job.wait_for_exit() == 0, job.process.tail()
            answer, *prompts = job.rows()
            assert answer == ["k", "7", "Si", "null"]
            assert sorted(prompts) == [["r1", "Who?", "8"], ["r2", "Where?", "null"]]
            assert job.restarts() == 0

    async def test_flink_reads_usage_through_registry(
        self, kafka: LogSettings, tmp_path: Path
    ) -> None:
        with running_registry() as registry:
            codec = make_codec(replace(kafka, schema_registry=registry.url))
            used = example(full_schema("Usage"))
            await send(kafka, "usage", [codec.encode(replace(used, number=n)) for n in (0, 1)])
            text = script(
                "usage.sql",
                bootstrap=kafka.bootstrap,
                prefix=kafka.topic_prefix,
                registry=registry.url,
            )
            text += "\nSELECT `number`, tenant, completion_tokens, worker_ms FROM `usage`;\n"
            async with running(text, tmp_path) as job:
                assert await job.wait_for_exit() == 0, job.process.tail()
                tail = [used.tenant, str(used.completion_tokens), str(used.worker_ms)]
                assert job.rows() == [["0", *tail], ["1", *tail]]

    async def test_flink_job_counts_restarts(self, tmp_path: Path) -> None:
        failing = (
            "SET 'parallelism.default' = '1';\n"
            "SET 'restart-strategy.type' = 'fixed-delay';\n"
            "SET 'restart-strategy.fixed-delay.attempts' = '2';\n"
            "SET 'restart-strategy.fixed-delay.delay' = '10ms';\n"
            "CREATE TABLE n (x BIGINT) WITH ('connector' = 'datagen', 'number-of-rows' = '5');\n"
            "CREATE TABLE o (x BIGINT) WITH ('connector' = 'blackhole');\n"
            "INSERT INTO o SELECT 1 / (x - x) FROM n;\n"
        )
        async with running(failing, tmp_path) as job:
            assert await job.wait_for_exit() != 0
            assert job.restarts() == 2
