"""Section [worker] of the settings, and the registry of engines."""

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Annotated, Any, NamedTuple

from schemas.sections import Natural, one_of, section
from workers.llm.engine import Engine


class EngineEntry(NamedTuple):
    """An engine: its `start` function, and the class of its own section, both as module:name."""

    start: str
    settings: str


ENGINES = {
    "sim": EngineEntry("workers.llm.sim.engine:start", "workers.llm.sim.settings:SimSettings"),
    "vllm": EngineEntry("workers.llm.vllm.start:start", "workers.llm.vllm.settings:VllmSettings"),
}
"""The engines by name: the registry. `worker.engine` chooses one."""


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
    start: Callable[..., Awaitable[Engine]] = _imported(ENGINES[name].start)
    return start


def engine_sections() -> dict[str, type[Any]]:
    """Return the classes of the engines' own settings by engine; imports no engine."""
    return {name: _imported(entry.settings) for name, entry in ENGINES.items()}


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
