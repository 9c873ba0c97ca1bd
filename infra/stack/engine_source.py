"""Composes an engine: its section of the settings, the model, and the worker that owns it.

`trivium run worker` uses it, and so do programs that compare a deployment with one engine alone.
The engine's module, and with it torch or NIXL, is imported only when an engine starts.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from infra.stack.configuration import ENGINE_SECTIONS, Settings
from schemas.errors import ConfigError
from schemas.records import Role
from schemas.sections import build
from schemas.settings import ModelSettings
from workers.config import ENGINES, engine_start
from workers.llm.engine import Engine


async def start_engine(
    name: str,
    section: Mapping[str, Any],
    *,
    model: ModelSettings,
    roles: Sequence[Role],
    worker_id: str,
    worker_epoch: int,
) -> Engine:
    """Start an engine from its `section` of the file, which the environment overrides.

    Raises ConfigError for an unknown engine or setting.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine: expected {' or '.join(sorted(ENGINES))}, found {name!r}")
    start = engine_start(name)
    # New in every epoch: a peer must never take this engine for an earlier one of the same worker.
    engine_id = f"{worker_id}-{worker_epoch}"
    settings = build(name, ENGINE_SECTIONS[name], section)
    owner = {"engine_id": engine_id, "worker_id": worker_id, "worker_epoch": worker_epoch}
    if name == "vllm":  # it starts no connector where no role hands KV over
        return await start(settings, model=model, role_set=tuple(roles), **owner)
    return await start(settings, model=model, **owner)


def engine_source(
    settings: Settings, worker_id: str, roles: Sequence[Role]
) -> Callable[[int], Awaitable[Engine]]:
    """Return a function that starts the worker's engine, given the worker's epoch."""
    name = settings.worker.engine
    section = settings.engines.get(name, {})
    return lambda epoch: start_engine(
        name,
        section,
        model=settings.model,
        roles=roles,
        worker_id=worker_id,
        worker_epoch=epoch,
    )
