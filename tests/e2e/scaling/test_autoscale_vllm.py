"""Real vLLM follows what waits: a worker starts under load, moves with its engine, and leaves."""

from pathlib import Path
from typing import Any

import pytest

from infra.scaling.settings import ScalingSettings
from infra.stack.configuration import Settings
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.config import RouterSettings
from tests.e2e.harness import GATEWAY, Client, stack
from tests.e2e.scaling.autoscaled_stack import Askers, pools, scaled
from tests.waits import START_S, until
from workers.config import WorkerSettings

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(2_400)]
GUESS_MS, LEAST_MS = 1, 1_000  # no start of vLLM takes so little
SCALING = ScalingSettings(
    ttft_ms=500,
    start_ms=GUESS_MS,
    settle_ms=4_000,
    up_after_ms=1_000,
    down_after_ms=10_000,
    workers_max=3,
)
# A worker decodes two answers at a time, and computes one prompt after the other.
ENGINE: dict[str, Any] = {
    "running_max": 2,
    "progress_timeout_ms": 120_000,
}


def settings(log: LogSettings) -> Settings:
    return Settings(
        log=log,
        model=ModelSettings(path="tiny", max_model_len=1_024),
        gateway=GatewaySettings(**GATEWAY),
        router=RouterSettings(policy="static", local_after_ms=600_000),  # every turn is remote
        worker=WorkerSettings(engine="vllm", prefill_running_max=1, drain_timeout_ms=30_000),
        engines={"vllm": ENGINE},
        scaling=SCALING,
    )


async def test_autoscaler_starts_moves_and_removes_vllm_workers(
    kafka: LogSettings, tmp_path: Path
) -> None:
    """The scaling policy starts with an estimate of 1 ms for a start and learns the real one."""
    home, seats = tmp_path / "home", SCALING.workers_max
    async with (
        stack(settings(kafka), home, seconds=1_500, prefill=1, decode=1, seats=seats) as running,
        scaled(running) as scaler,
        Client(running.gateway_urls[0], running.settings.model.served_name) as client,
    ):
        first = {name: process.pid for name, process in running.processes.items()}
        long_answers = Askers(client, 8, "Tell me a story.", max_tokens=200)
        await until(lambda: pools(running) == (1, 2), seconds=START_S)
        lives = {name: process.pid for name, process in running.processes.items()}
        assert first.items() <= lives.items() and len(lives) == len(first) + 1, "once, one"
        await until(lambda: scaler.start_ms > LEAST_MS)
        await long_answers.stop()

        long_prompts = Askers(client, 8, "and so on " * 200, max_tokens=1)
        await until(lambda: pools(running) == (2, 1), seconds=START_S)
        assert {name: process.pid for name, process in running.processes.items()} == lives
        await long_prompts.stop()

        await until(lambda: pools(running) == (1, 1), seconds=START_S)
        await until(lambda: len(running.processes) == len(first), seconds=START_S)
        assert not any(process.restarts for process in running.processes.values())
        assert (await client.chat("Are you there?")).status == 200
