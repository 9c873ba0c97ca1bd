"""Section [worker] of the settings, and the table from engine names to their `start` functions.

An engine's own settings are in `workers/llm/sim/settings.py` and `workers/llm/vllm/settings.py`.
"""

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Annotated, Any

from schemas.sections import Natural, one_of, section
from workers.llm.engine import Engine

ENGINES = {
    "sim": "workers.llm.sim.engine:start",
    "vllm": "workers.llm.vllm.start:start",
}


@section("worker")
class WorkerSettings:
    """Section [worker]: engine, limits and timeout of a worker."""

    engine: Annotated[str, one_of(*ENGINES)] = "vllm"
    # prefill requests of all routers at once; 0: the engine's running_max
    prefill_credits: Natural = 0
    decode_credits: Natural = 0  # decode or replica requests; 0: the engine's running_max
    # prefill prompts in the engine at once; 0: the engine decides
    prefill_running_max: Natural = 0
    # from SIGTERM; routers place the requests that are left then on other workers
    drain_timeout_ms: Natural = 30_000


def engine_start(name: str) -> Callable[..., Awaitable[Engine]]:
    """Return an engine's `start` function; only this call imports its module, and so torch."""
    module, _, function = ENGINES[name].partition(":")
    start: Any = getattr(import_module(module), function)
    return start  # type: ignore[no-any-return]  # found by name
