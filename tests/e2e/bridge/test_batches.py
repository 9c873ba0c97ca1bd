"""/v1/batches over real bridges, whatever dies."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.stack.launcher import Stack
from schemas.settings import LogSettings
from streams.openai.batches.lines import ENDPOINTS
from tests.e2e.harness import sim_settings, stack
from tests.waits import PATIENCE_S, START_S, until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
CHAT: Any = ENDPOINTS[0]
Kafka = Callable[..., Awaitable[LogSettings]]


def call(number: int, *, url: str = CHAT, **fields: Any) -> bytes:
    """A line."""
    messages = [{"role": "user", "content": f"Question {number}"}]
    body = {"model": "sim", "messages": messages, "max_tokens": 4, **fields}
    line = {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
    return json.dumps(line).encode()


def client(running: Stack, number: int) -> openai.AsyncOpenAI:
    """Of one of the gateways."""
    return openai.AsyncOpenAI(
        base_url=running.gateway_urls[number] + "/v1", api_key="none", timeout=PATIENCE_S
    )


async def create_batch(ai: openai.AsyncOpenAI, lines: list[bytes], endpoint: Any = CHAT) -> Any:
    data = b"\n".join(lines)
    file = await ai.files.create(file=("calls.jsonl", data), purpose="batch")
    return await ai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h"
    )


async def results(ai: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await ai.files.content(file_id)).content.splitlines()]


async def wait_for_batch(ai: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def has_ended() -> bool:
        status = (await ai.batches.retrieve(batch_id)).status
        return status in ("failed", "completed", "expired", "cancelled")

    await until(has_ended, seconds=START_S)
    return await ai.batches.retrieve(batch_id)


async def test_batch_survives_gateway_death(kafka_with: Kafka, tmp_path: Path) -> None:
    """Each line is in one of the files, once; errors of lines are reported as over HTTP."""
    log = await kafka_with(gateway_partitions=4)
    lines = [call(number) for number in range(800)]
    lines[5], lines[6] = call(5, temperature=9), call(6, n=10**6)
    async with stack(sim_settings(log), tmp_path, replica=1, gateways=2, bridges=1) as running:
        async with client(running, 0) as first:
            batch = await create_batch(first, lines)

            async def is_under_way() -> bool:
                counts = (await first.batches.retrieve(batch.id)).request_counts
                return counts is not None and 0 < counts.completed < 700

            await until(is_under_way)
            await running.kill("gateway-0")
        async with client(running, 1) as ai:
            finished_batch = await wait_for_batch(ai, batch.id)
            counts = finished_batch.request_counts
            assert (finished_batch.status, counts.completed, counts.failed) == ("completed", 798, 2)
            answers = await results(ai, finished_batch.output_file_id)
            errors = await results(ai, finished_batch.error_file_id)
    ids = Counter(result["custom_id"] for result in answers + errors)
    assert ids == Counter(f"c{number}" for number in range(800))
    for result in answers:
        (choice,) = result["response"]["body"]["choices"]
        assert choice["message"]["content"] and result["response"]["request_id"]
    wrong = {result["custom_id"]: result["response"] for result in errors}
    assert {name: response["status_code"] for name, response in wrong.items()} == {
        "c5": 400,
        "c6": 400,
    }
    assert "temperature" in wrong["c5"]["body"]["error"]["message"]


async def test_bridge_skips_lines_of_cancelled_batch(kafka_with: Kafka, tmp_path: Path) -> None:
    """A later batch does not wait for the lines of a cancelled one."""
    log = await kafka_with(gateway_partitions=4)
    slow = sim_settings(log, decode_step_ms=100.0)
    async with (
        stack(slow, tmp_path, replica=1, bridges=1) as running,
        client(running, 0) as ai,
    ):
        batch = await create_batch(ai, [call(number, max_tokens=1_000) for number in range(3_000)])

        async def is_sent() -> bool:
            return (await ai.batches.retrieve(batch.id)).status == "in_progress"

        await until(is_sent)
        await ai.batches.cancel(batch.id)
        finished_batch = await wait_for_batch(ai, batch.id)
        assert finished_batch.status == "cancelled"
        later = await create_batch(ai, [call(0, max_tokens=2)])
        finished_batch = await wait_for_batch(ai, later.id)
        assert finished_batch.status == "completed", "it does not wait for 3 000 others"
