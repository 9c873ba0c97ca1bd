"""A stack that follows what waits: workers start, move and leave under load; nothing is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.scaling.settings import ScalingSettings
from schemas.settings import LogSettings
from tests.e2e.harness import Client, sim_settings, stack
from tests.e2e.scaling.autoscaled_stack import Askers, metric, pools, scaled
from tests.waits import START_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]
SCALING = ScalingSettings(
    ttft_ms=500, settle_ms=4_000, up_after_ms=1_000, down_after_ms=6_000, workers_max=3
)
# A worker decodes two answers at a time, and computes one prompt after the other.
ENGINE: dict[str, Any] = {
    "decode_step_ms": 20.0,
    "running_max": 2,
    "prefill_running_max": 1,
    "prefill_ms_per_token": 0.5,
}


async def test_autoscaler_starts_moves_and_removes_workers_with_load(
    kafka: LogSettings, tmp_path: Path
) -> None:
    settings = replace(sim_settings(kafka, **ENGINE), scaling=SCALING)
    async with stack(settings, tmp_path / "home", prefill=1, decode=1) as running, scaled(running):
        model = running.settings.model.served_name
        async with Client(running.gateway_urls[0], model) as client:
            long_answers = Askers(client, 8, "Tell me a story.", max_tokens=150)
            await until(lambda: pools(running) == (1, 2), seconds=START_S)
            lives = {name: process.pid for name, process in running.processes.items()}
            await long_answers.stop()

            long_prompts = Askers(client, 8, "and so on " * 200, max_tokens=1)
            await until(lambda: pools(running) == (2, 1), seconds=START_S)
            assert {name: process.pid for name, process in running.processes.items()} == lives
            assert await metric(running.gateway_urls[0], "prefill") == 2
            await long_prompts.stop()

            await until(lambda: pools(running) == (1, 1), seconds=START_S)
            assert (await client.chat("Are you there?")).status == 200
            assert (
                len([name for name in running.plan.names() if "code" in name or "fill" in name])
                == 2
            )
