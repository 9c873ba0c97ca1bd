"""How far bridges are, from Kafka alone: records, time, owner and rate."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer

from infra.stack import bridge_lag
from infra.stack.bridge_lag import Lag, bridge_lags
from schemas.codec import Codec
from schemas.settings import LogSettings
from streams.bridge.app import group_id
from streams.bridge.config import BridgeSettings
from streams.bridge.progress import CommitNote, encode
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.connecting import client_options
from streams.log.transactions import CommittedOffset, OutgoingRecord, Transactions
from tests.infra.cli.trivium_runner import trivium_here
from tests.streams.log.transaction_wait import settle

pytestmark = pytest.mark.kafka
AGE_MS = 60_000


async def ask(log: LogSettings, count: int, *, ago_ms: int = AGE_MS) -> None:
    """Write prompts to partition 1, each a second younger than the one before."""
    producer = LogProducer(log, Codec(), durable=True, client_id="test")
    async with producer:
        for number in range(count):
            assert producer._producer is not None
            await producer._producer.send_and_wait(
                f"{log.topic_prefix}prompts",
                b'{"text": "?"}',
                partition=1,
                timestamp_ms=wall_ms() - ago_ms + 1_000 * number,
            )


async def answer(log: LogSettings, offsets: list[int], position: int, ahead: set[int]) -> None:
    """Commit answers as a bridge does."""
    prompts, transactions = f"{log.topic_prefix}prompts", Transactions(log, "bridge-test")
    await transactions.start()
    sends = [
        OutgoingRecord(
            topic=f"{log.topic_prefix}answers",
            partition=1,
            key=None,
            value=b"{}",
            headers=(
                ("trivium-prompt-topic", prompts.encode()),
                ("trivium-prompt-partition", b"1"),
                ("trivium-prompt-offset", str(offset).encode()),
            ),
        )
        for offset in offsets
    ]
    note = encode(CommitNote({}, ahead), position)
    await transactions.commit(sends, {(prompts, 1): CommittedOffset(position, note)}, group_id(log))
    await transactions.stop()
    await settle(log, "bridge-test")


@asynccontextmanager
async def member(log: LogSettings, name: str) -> AsyncIterator[None]:
    """A group member that has all partitions of the prompts."""
    consumer = AIOKafkaConsumer(
        f"{log.topic_prefix}prompts",
        **client_options(log),
        client_id=name,
        group_id=group_id(log),
        enable_auto_commit=False,
    )
    await consumer.start()
    try:
        yield
    finally:
        await consumer.stop()


async def lags(log: LogSettings) -> dict[int, Lag]:
    rows = await bridge_lags(log, BridgeSettings())
    return {row.partition: row for row in rows if row.pair == f"{log.topic_prefix}prompts"}


async def test_bridge_lag_counts_unanswered_prompts(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts before any bridge ran, too; answers beyond the first gap reduce it."""
    await ask(kafka, 5)
    before = await lags(kafka)
    assert (before[0].lag, before[0].oldest_ms, before[0].owner) == (0, 0, "")
    assert (before[1].position, before[1].end, before[1].lag) == (0, 5, 5)
    assert AGE_MS <= before[1].oldest_ms < 2 * AGE_MS and before[1].answers_per_s == 0

    await answer(kafka, [0, 3], position=1, ahead={3})
    answered_ms = wall_ms()
    async with member(kafka, "bridge-7"):
        with monkeypatch.context() as patched:  # a rate is that of the last seconds
            patched.setattr(bridge_lag, "wall_ms", lambda: answered_ms)
            row = (await lags(kafka))[1]
    assert (row.position, row.lag, row.owner) == (1, 3, "bridge-7")
    assert row.oldest_ms >= AGE_MS - 1_000 and 0 < row.answers_per_s <= 0.2

    await answer(kafka, [1, 2, 4], position=5, ahead=set())
    row = (await lags(kafka))[1]
    assert (row.position, row.lag, row.oldest_ms, row.owner) == (5, 0, 0, "")


async def test_bridge_lag_excludes_transaction_markers_after_answer(kafka: LogSettings) -> None:
    """Markers lie around the prompt where its producer writes in transactions."""
    prompts, transactions = f"{kafka.topic_prefix}prompts", Transactions(kafka, "producer")
    await transactions.start()
    sending = OutgoingRecord(topic=prompts, partition=1, key=None, value=b"?")
    (offset,) = await transactions.commit([sending])
    await transactions.stop()
    await settle(kafka, "producer")
    assert (await lags(kafka))[1].lag == 4, "prompt, void record and marks, as lag tools count"
    await answer(kafka, [offset], position=offset + 1, ahead=set())
    assert (await lags(kafka))[1].lag == 0


def test_bridge_status_command_prints_lag(kafka: LogSettings) -> None:
    asyncio.run(ask(kafka, 2))
    env = {"TRIVIUM_LOG_TOPIC_PREFIX": kafka.topic_prefix}
    command = ("status", "--bridges", "--bootstrap", kafka.bootstrap)
    code, output, errors = trivium_here(*command, "--json", env=env)
    assert (code, errors) == (0, "")
    rows = {(row["pair"], row["partition"]): row["lag"] for row in json.loads(output)}
    assert rows[f"{kafka.topic_prefix}prompts", 1] == 2
    assert rows[f"{kafka.topic_prefix}batch.prompts", 0] == 0
    code, output, _ = trivium_here(*command, env=env)
    assert code == 0 and "none" in output and "oldest" in output
