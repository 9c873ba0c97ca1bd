"""Section [worker] of the settings, and the table from engine names to their `start` functions.

The settings of an engine itself are in its room: `llm/sim/settings.py`, `llm/vllm/settings.py`.
"""

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field

from schemas.sections import Natural, Positive, one_of, section
from workers.llm.engine import Engine

ENGINES = {
    "sim": "workers.llm.sim.engine:start",
    "vllm": "workers.llm.vllm.start:start",
}
KV_EVENTS_BLOCKS_LIMIT = 65_536  # of a batch, which is then 512 KiB and fits the log


@section("worker")
class WorkerSettings:
    """Section [worker]: how much a worker takes, and how it stops."""

    engine: Annotated[str, one_of(*ENGINES)] = "vllm"
    # prefill requests at once, of all routers; 0: the engine's running_max
    prefill_credits: Natural = 0
    decode_credits: Natural = 0  # the same for decode and replica
    # of these prompts, in the engine at once; 0: as it sees fit
    prefill_running_max: Natural = 0
    # after SIGTERM, what is left then is placed elsewhere
    drain_timeout_ms: Natural = 30_000
    close_timeout_ms: Positive = 10_000  # for the engine to close
    seen_max: Positive = 16_384  # requests remembered, so that repeated work is ignored
    # phases and outcomes without acknowledgement; then no new work
    reports_pending_max: Positive = 1_024
    report_tries_max: Positive = 5  # sends of one phase or outcome before the worker gives up
    # between frames to a gateway; grows with streams beyond 64
    frame_interval_ms: Natural = 20
    frame_interval_ms_max: Natural = 32  # a reader still sees 30 updates a second
    # tokens of so few streams leave at once; first tokens always do
    frame_at_once_max: Natural = 16
    kv_events_interval_ms: Positive = 200  # between batches of what the prefix cache holds
    kv_events_blocks_max: Annotated[int, Field(ge=1, le=KV_EVENTS_BLOCKS_LIMIT)] = 4_096
    kv_snapshot_interval_s: Positive = 60  # between tellings of everything that it holds
    # work taken at once, so that reading never holds decode up for long
    read_records_max: Positive = 64


def engine_start(name: str) -> Callable[..., Awaitable[Engine]]:
    """The `start` function of an engine; its module, and so torch, is imported only here."""
    module, _, function = ENGINES[name].partition(":")
    start: Any = getattr(import_module(module), function)
    return start  # type: ignore[no-any-return]  # found by name
