"""A stack that serves what `trivium up` serves by default: a real instruct model through vLLM.

Other models of `workers/models/wheels.py` are served likewise.

The model is unpacked once per working tree, into `build`; `make clean` takes it away.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from schemas.settings import LogSettings, ModelSettings
from schemas.state_folder import home
from streams.calls.config import GatewaySettings
from tests.e2e.harness import GATEWAY, stack
from workers.config import WorkerSettings
from workers.models.wheels import SMOLLM2, wheel_folder

_KEPT = Path(__file__).parents[3] / "build"
_PATIENT = {"progress_timeout_ms": 120_000}


def keep_real_model(name: str = SMOLLM2) -> None:
    """Have the model where this session's stacks look for it."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TRIVIUM_HOME", str(_KEPT))
        folder = wheel_folder(name)
    place = home() / "models" / folder.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(folder)


@asynccontextmanager
async def real_stack(
    log: LogSettings, folder: Path, model: str = SMOLLM2, **plan: Any
) -> AsyncIterator[Stack]:
    """Processes with default settings, but for the model and a test's patience."""
    keep_real_model(model)
    settings = Settings(
        log=log,
        model=ModelSettings(path=model),
        gateway=GatewaySettings(**GATEWAY),
        worker=WorkerSettings(drain_timeout_ms=2_000),
        engines={"vllm": _PATIENT},
    )
    async with stack(settings, folder, seconds=1_500, **plan) as running:
        yield running
