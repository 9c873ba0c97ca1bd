"""Section [worker] of the settings, and the registry of engines."""

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from schemas.sections import Natural, Positive, one_of, section
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
KV_EVENTS_BLOCKS_LIMIT = 65_536  # blocks in one record: 512 KiB, which fits the log's limit


@section("worker")
class WorkerSettings:
    """Section [worker]: limits, intervals and timeouts of a worker."""

    engine: Annotated[str, one_of(*ENGINES)] = "vllm"
    # prefill requests of all routers at once; 0: the engine's running_max
    prefill_credits: Natural = 0
    decode_credits: Natural = 0  # decode or replica requests; 0: the engine's running_max
    # prefill prompts in the engine at once; 0: the engine decides
    prefill_running_max: Natural = 0
    # from SIGTERM; routers place the requests that are left then on other workers
    drain_timeout_ms: Natural = 30_000
    close_timeout_ms: Positive = 10_000  # for the engine to close
    seen_max: Positive = 16_384  # request ids that are remembered, to ignore repeated work
    # unacknowledged phases and outcomes; at this number the worker reads no new work
    reports_pending_max: Positive = 1_024
    report_tries_max: Positive = 5  # sends of one phase or outcome before the worker gives up
    # between two frames for a gateway; grows with the number of streams above 64
    frame_interval_ms: Natural = 20
    frame_interval_ms_max: Natural = 32  # a reader still sees 30 updates a second
    # with this many streams or fewer, tokens leave at once; first tokens always do
    frame_at_once_max: Natural = 16
    kv_events_interval_ms: Positive = 200  # between two batches of prefix cache changes
    kv_events_blocks_max: Annotated[int, Field(ge=1, le=KV_EVENTS_BLOCKS_LIMIT)] = 4_096
    kv_snapshot_interval_s: Positive = 60  # between two snapshots of the prefix cache
    # work records per read, so that reading never delays decode for long
    read_records_max: Positive = 64


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
