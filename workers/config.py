"""Section [worker] of the settings, and the table from engine names to their `start` functions.

The settings of an engine itself are in its room: `llm/sim/settings.py`, `llm/vllm/settings.py`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from schemas.errors import ConfigError
from workers.llm.engine import Engine

ENGINES = {
    "sim": "workers.llm.sim.engine:start",
    "vllm": "workers.llm.vllm.engine:start",
}
KV_EVENTS_BLOCKS_LIMIT = 65_536  # 512 KiB of a batch
_AT_LEAST = {
    "prefill_credits": 0,
    "decode_credits": 0,
    "prefill_running_max": 0,
    "drain_timeout_ms": 0,
    "close_timeout_ms": 1,
    "seen_max": 1,
    "reports_pending_max": 1,
    "report_tries_max": 1,
    "read_records_max": 1,
    "kv_events_interval_ms": 1,
    "kv_events_blocks_max": 1,
    "kv_snapshot_interval_s": 1,
    "frame_interval_ms": 0,
    "frame_interval_ms_max": 0,
    "frame_at_once_max": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Section [worker]: how much a worker takes, and how it stops."""

    engine: str = "vllm"
    prefill_credits: int = (
        0  # prefill requests at once, of all routers; 0: the engine's running_max
    )
    decode_credits: int = 0  # the same for decode and replica
    prefill_running_max: int = 0  # of these prompts, in the engine at once; 0: as it sees fit
    drain_timeout_ms: int = 30_000  # after SIGTERM, what is left then is placed elsewhere
    close_timeout_ms: int = 10_000  # for the engine to close
    seen_max: int = 16_384  # requests remembered, so that repeated work is ignored
    reports_pending_max: int = (
        1_024  # phases and outcomes without acknowledgement; then no new work
    )
    report_tries_max: int = 5  # sends of one phase or outcome before the worker gives up
    frame_interval_ms: int = 10  # between frames to a gateway; grows with streams beyond 64
    frame_interval_ms_max: int = 32  # a reader still sees 30 updates a second
    frame_at_once_max: int = 16  # tokens of so few streams leave at once; first tokens always do
    kv_events_interval_ms: int = 200  # between batches of what the prefix cache holds
    kv_events_blocks_max: int = 4_096  # blocks in a batch
    kv_snapshot_interval_s: int = 60  # between tellings of everything that it holds
    read_records_max: int = 64  # work taken at once, so that reading never holds decode up for long

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(
                f"worker.engine: expected {' or '.join(sorted(ENGINES))}, found {self.engine!r}"
            )
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"worker.{name}: expected at least {least}, found {getattr(self, name)}"
                )
        if self.kv_events_blocks_max > KV_EVENTS_BLOCKS_LIMIT:
            raise ConfigError(
                f"worker.kv_events_blocks_max: expected at most {KV_EVENTS_BLOCKS_LIMIT}, for a "
                f"batch to fit the log, found {self.kv_events_blocks_max}"
            )


def engine_start(name: str) -> Callable[..., Awaitable[Engine]]:
    """The `start` function of an engine; its module, and so torch, is imported only here."""
    module, _, function = ENGINES[name].partition(":")
    start: Any = getattr(import_module(module), function)
    return start  # type: ignore[no-any-return]  # found by name
