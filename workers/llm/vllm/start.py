"""Starts the vLLM engine outside of the event loop; if cancelled, it ends the started processes.

Only `start` imports vLLM. `workers/config.py` names it.
"""

import asyncio
import os
from collections.abc import Collection
from importlib import import_module
from types import ModuleType
from typing import Any

from schemas.records import Role
from schemas.settings import ModelSettings
from workers.llm.vllm.engine import VllmEngine
from workers.llm.vllm.handover import Handover
from workers.llm.vllm.settings import VllmSettings


async def start(
    settings: VllmSettings,
    *,
    model: ModelSettings,
    role_set: Collection[Role],
    engine_id: str,
    worker_id: str,
    worker_epoch: int,
) -> VllmEngine:
    """Start an engine that is ready to serve. It takes 20 s or more, in a thread."""
    has_transfer = settings.kv_transfer != "off" and bool({Role.PREFILL, Role.DECODE} & {*role_set})
    settings = settings if has_transfer else settings.without_transfer()

    def launch() -> tuple[ModuleType, ModuleType, Any]:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
        launcher = import_module("workers.llm.vllm.launch")
        launched = launcher.launch(settings, model, engine_id=engine_id, has_transfer=has_transfer)
        return launcher, import_module("workers.llm.vllm.api"), launched

    starting = asyncio.get_running_loop().run_in_executor(None, launch)
    try:
        launcher, api, launched = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_end_unwanted)
        raise
    capability = launched.capability
    handover = Handover(settings, capability, worker_id=worker_id, worker_epoch=worker_epoch)
    engine = VllmEngine(settings, handover, launcher, api, launched)
    await engine.prepare()
    return engine


def _end_unwanted(starting: "asyncio.Future[Any]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        launcher, _, launched = starting.result()
        launcher.end(launched, 0.0)
