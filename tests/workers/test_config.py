"""Settings that stop the start, and where engines are found."""

from typing import Any

import pytest

from schemas.errors import ConfigError
from workers.config import WorkerSettings, engine_start
from workers.llm.sim import engine as sim_engine
from workers.llm.vllm import start as vllm_start


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "tpu"}, "worker.engine: expected one of sim, vllm, found 'tpu'"),
        ({"decode_credits": -1}, "worker.decode_credits: expected at least 0, found -1"),
    ],
)
def test_worker_settings_reject_invalid_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerSettings(**changes)


def test_engine_start_finds_engine_by_name() -> None:
    """This needs no package vllm: only a start imports it."""
    assert engine_start("sim") is sim_engine.start
    assert engine_start("vllm") is vllm_start.start
