"""Two models share the workers of one deployment as their loads change, and nothing is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.scaling.settings import ScalingSettings
from infra.stack.launcher import Stack
from schemas.settings import LogSettings, ModelSettings
from tests.e2e.harness import Client, sim_settings, stack
from tests.e2e.scaling.autoscaled_stack import Askers, scaled
from tests.waits import START_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]
SCALING = ScalingSettings(
    ttft_ms=500, settle_ms=4_000, up_after_ms=1_000, down_after_ms=6_000, workers_max=4
)
ENGINE: dict[str, Any] = {
    "decode_step_ms": 20.0,
    "running_max": 2,
}  # a worker generates two answers at a time


def counts(running: Stack) -> dict[str, int]:
    """Return the ready workers of each model."""
    models = [running.plan.models[name] for name in running.plan.engine_names()]
    ready = all(running.state_of(name) == "ready" for name in running.plan.engine_names())
    return {model: models.count(model) for model in ("a", "b")} if ready else {}


async def test_workers_follow_the_load_from_one_model_to_the_other(
    kafka: LogSettings, tmp_path: Path
) -> None:
    settings = replace(sim_settings(kafka, **ENGINE), scaling=SCALING)
    models = [ModelSettings(path="sim", name=name) for name in ("a", "b")]
    settings = settings.with_models(models)
    async with stack(settings, tmp_path / "home", replica=2) as running, scaled(running):
        url = running.gateway_urls[0]
        async with Client(url, "a") as a, Client(url, "b") as b:
            askers = Askers(a, 12, "Tell me a story.", max_tokens=150)
            await until(lambda: counts(running) == {"a": 3, "b": 1}, seconds=START_S)
            assert (await b.chat("Are you there?")).status == 200
            await askers.stop()
            askers = Askers(b, 12, "Tell me a story.", max_tokens=150)
            await until(lambda: counts(running) == {"a": 1, "b": 3}, seconds=START_S)
            names = [f"replica-{number}" for number in range(4)]
            assert sorted(running.plan.engine_names()) == names, "none was started or left"
            await askers.stop()
            assert (await a.chat("Are you there?")).status == 200
