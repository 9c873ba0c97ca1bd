"""Section [retrieval] of the settings: what a retrieval worker holds, and how it serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError
from workers.search.control import ControlSettings

if TYPE_CHECKING:
    from workers.search.scheduler import SchedulerSettings

DEVICES = ("cpu", "cuda", "auto")  # of backend.py, which is slow to import too
DEGREE_MAX = 341  # of index.py
TOP_M_MAX = 512  # of admission.py
TASKS_MAX = 4_096  # of slots.py
METRICS = ("sqeuclidean", "inner_product", "cosine")  # of metrics.py, whose import takes a second

_AT_LEAST = {
    "degree": 2,
    "top_m": 1,
    "width": 1,
    "pending_max": 1,
    "collections_max": 1,
    "snapshot_interval_s": 1,
    "drain_timeout_ms": 0,
    "close_timeout_ms": 1,
    "upkeep_interval_ms": 1,
    "control_interval_ms": 1,
    "link_target_bytes_per_s": 0,
    "compact_share": 0,
    "flush_ms": 0,
    "share": 0,
}
_AT_MOST = {"degree": DEGREE_MAX, "top_m": TOP_M_MAX}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """Of every retrieval worker; which shard it holds is told on its command line."""

    metrics: tuple[str, ...] = ()  # "collection=metric"; other collections are cosine
    device: str = "cpu"  # where searches run; cuda needs CuPy, auto takes cuda where it can
    degree: int = 32  # edges of a row in the graph
    top_m: int = 64  # length of the routing list where a retrieval names none
    width: int = 1  # entries expanded per extend where a retrieval names none
    collections_max: int = 256
    pending_max: int = 4_096  # retrievals taken and not acknowledged; then the log waits
    share: float = 0.5  # of free slots, reserved for prefill, until the control loop moves it
    flush_ms: float = (
        5.0  # the longest that a prefill search waits, until the control loop moves it
    )
    control_interval_ms: int = 300
    link_target_bytes_per_s: float = 0.0  # of all KV moved between workers; 0: not watched
    wait_target_ms: float = 2.0  # prefill's wait for a slot, 95th percentile
    stall_target: float = 0.05  # share of decode time that waits for retrievals
    upkeep_interval_ms: int = 500  # between looks for documents to link
    compact_share: float = 0.2  # of deleted rows, from which an index is compacted
    snapshot_folder: str = ""  # empty: no snapshots, an index is rebuilt from `documents`
    snapshot_interval_s: int = 300
    drain_timeout_ms: int = 10_000
    close_timeout_ms: int = 10_000

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"retrieval.{name}: expected at least {least}, found {getattr(self, name)}"
                )
        for name, most in _AT_MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"retrieval.{name}: expected at most {most}, found {getattr(self, name)}"
                )
        if self.width * self.degree > TASKS_MAX:
            raise ConfigError(
                f"retrieval.width: expected at most {TASKS_MAX // self.degree} with degree "
                f"{self.degree}, found {self.width}"
            )
        if self.device not in DEVICES:
            raise ConfigError(
                f"retrieval.device: expected one of {', '.join(DEVICES)}, found {self.device!r}"
            )
        for each in self.metrics:
            name, _, metric = each.partition("=")
            if not name or metric not in METRICS:
                raise ConfigError(
                    f"retrieval.metrics: expected collection=metric with a metric of "
                    f"{', '.join(METRICS)}, found {each!r}"
                )
        if self.share > 1:
            raise ConfigError(f"retrieval.share: expected 0 to 1, found {self.share}")
        self.control()

    def metric_of(self, collection: str) -> str:
        """What a collection's distances are."""
        named: Mapping[str, str] = dict(each.split("=", 1) for each in self.metrics)
        return named.get(collection, "cosine")

    def scheduler(self) -> "SchedulerSettings":
        """The queues' part."""
        from workers.search.scheduler import SchedulerSettings

        return SchedulerSettings(share=self.share, flush_ms=self.flush_ms)

    def control(self) -> ControlSettings:
        """The control loop's part."""
        targets: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("link_target_bytes_per_s", "wait_target_ms", "stall_target")
        }
        return ControlSettings(interval_ms=self.control_interval_ms, **targets)


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Which shard of how many; written 0/2."""

    shard: int
    shards: int

    def __str__(self) -> str:
        return f"{self.shard}/{self.shards}"

    @classmethod
    def parse(cls, text: str) -> "ShardPlace":
        """The shard that `text` names; raises ConfigError."""
        shard, slash, shards = text.partition("/")
        if not (slash and shard.isdecimal() and shards.isdecimal() and int(shard) < int(shards)):
            raise ConfigError(
                f"--shard: expected SHARD/SHARDS with shards counted from 0, as in 0/2, "
                f"found {text!r}"
            )
        return cls(int(shard), int(shards))
