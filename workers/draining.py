"""When a worker that takes no more work has nothing left to wait for."""

import asyncio

from schemas.fleet import HEARTBEAT_MS
from schemas.log.clock import wall_ms
from workers.llm.engine import Engine
from workers.llm.held import Held

# Figures of EngineLoad.extra, by engine: how many handed-over KVs still wait for their peer.
HANDLES_HELD = ("kv_handles_held", "held")


async def finished(held: Held, engine: Engine) -> None:
    """Wait until nothing is held, and all KV that was handed over is read or has expired."""
    empty = asyncio.Event()
    held.on_empty = empty.set
    if len(held):
        await empty.wait()
    # Engines have no event for it, hence the look now and then.
    while wall_ms() < held.kv_until_ms and not _kv_is_gone(engine):  # noqa: ASYNC110
        await asyncio.sleep(HEARTBEAT_MS / 1000)


def _kv_is_gone(engine: Engine) -> bool:
    figures = engine.load().extra
    return any(figures.get(name) == 0 for name in HANDLES_HELD)
