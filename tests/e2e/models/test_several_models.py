"""Two models in one deployment: each call is answered by the model that it names."""

from pathlib import Path

import pytest

from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.rolling import load_model
from schemas.errors import ConfigError
from schemas.records import MemberKind, Role
from schemas.settings import LogSettings, ModelSettings
from streams.log.clock import wall_ms
from tests.e2e.harness import sim_settings, stack
from tests.waits import START_S

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

WORDS, TINY = "org/words", "tiny"  # their tokenizers differ


def settings_of(log: LogSettings) -> Settings:
    """Two models with other tokenizers, prompts and lengths."""
    tiny = ModelSettings(path="tiny", name=TINY, tool_parser="none", reasoning_parser="none")
    words = ModelSettings(path="sim", name=WORDS, max_model_len=3_000)
    return sim_settings(log).with_models([words, tiny])


def models_in_fleet(running: Stack) -> dict[str, str]:
    """Return the model of each ready worker, as it has registered."""
    assert running.fleet is not None
    living = running.fleet.view.living(MemberKind.WORKER, wall_ms())
    return {
        w.member_id: w.registration.capability.model for w in living if w.registration.capability
    }


async def test_worker_moves_to_another_model_and_back(kafka: LogSettings, tmp_path: Path) -> None:
    async with stack(settings_of(kafka), tmp_path, replica=2) as running:
        served = {"replica-0": WORDS, "replica-1": WORDS, "replica-2": TINY, "replica-3": TINY}
        assert models_in_fleet(running) == served
        before = running.processes["replica-1"].pid
        assert (
            await load_model("replica-1", TINY, folder=tmp_path, process_timeout_s=START_S) == WORDS
        )
        assert models_in_fleet(running) == served | {"replica-1": TINY}
        after = running.processes["replica-1"].pid
        assert after != before
        await running.kill("replica-1")
        await running.wait_ready("replica-1")
        assert models_in_fleet(running) == served | {"replica-1": TINY}, "it keeps the model"
        await running.load_model("replica-1", WORDS, role=Role.DECODE)
        assert models_in_fleet(running) == served
        assert running.fleet is not None
        roles = running.fleet.view.members["replica-1"].registration.roles
        assert list(roles) == [Role.DECODE]
        with pytest.raises(ConfigError, match="expected one of org/words, tiny, found 'x'"):
            await running.load_model("replica-1", "x")
        with pytest.raises(ConfigError, match="worker: expected one of replica-0, .*, found 'r'"):
            await running.load_model("r", TINY)
        await running.scale(model=TINY, replica=1)
        assert running.plan.counts(TINY)["replica"] == 1
