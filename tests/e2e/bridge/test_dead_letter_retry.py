"""A prompt without an answer is a dead letter, and is asked again from there."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.app import app
from schemas.settings import LogSettings
from tests.e2e.bridge.topics import AnswerReader, Sent, produce
from tests.e2e.harness import sim_settings, stack

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]


async def run_command(log: LogSettings, *words: str) -> Any:
    """Run a command of the CLI and return its JSON."""
    env = {
        "TRIVIUM_LOG_TOPIC_PREFIX": log.topic_prefix,
        "TRIVIUM_LOG_PROMPT_PARTITIONS": str(log.prompt_partitions),
    }
    command = partial(CliRunner().invoke, app, [*words, "--json", "--bootstrap", log.bootstrap])
    result = await asyncio.to_thread(command, env=env)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def test_bridge_answers_retried_dead_letter(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    log = await kafka_with(gateway_partitions=4)
    prompts, sent_prompts = f"{log.topic_prefix}prompts", Sent()
    good, bad = {"text": "Why?", "max_tokens": 4}, {"text": "x", "max_tokens": -1}
    async with (
        stack(sim_settings(log), tmp_path, replica=1, bridges=1),
        AnswerReader(log, f"{log.topic_prefix}answers") as reader,
    ):
        await produce(log, prompts, [("good", good), ("bad", bad)], sent_prompts)
        await reader.until(2)
        rows = [
            row for row in await run_command(log, "status", "--bridges") if row["pair"] == prompts
        ]
        assert {(row["lag"], row["owner"]) for row in rows} == {(0, "bridge-0")}
        assert sum(row["answers_per_s"] for row in rows) > 0

        listed = await run_command(log, "dlq", "list", "--error", "max_tokens")
        (letter,) = listed["newest"]
        assert listed["waiting"] == {prompts: 1} and letter["key"] == "bad"
        place = (int(letter["dead_letter"]["partition"]), int(letter["dead_letter"]["offset"]))
        assert sent_prompts.keys[place] == "bad"
        assert (await run_command(log, "dlq", "list", letter["name"]))["value"] == bad

        assert (await run_command(log, "dlq", "retry", letter["name"]))["sent"] == 1
        read = await reader.until(3)
        retry_place = max(at for at in read.values if at[0] == place[0])
        assert (
            retry_place > place and read.values[retry_place][0]["error_code"] == "invalid_request"
        )
        listed = await run_command(log, "dlq", "list")
        assert (listed["waiting"], listed["retried"]) == ({prompts: 1}, {prompts: 1})
