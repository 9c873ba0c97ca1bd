"""Section [retrieval] of the settings: what a retrieval worker holds, and how it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError
from workers.search.control import ControlSettings

if TYPE_CHECKING:
    from workers.search.scheduler import SchedulerSettings

DEVICES = ("cpu", "cuda", "auto")  # of backend.py, which is slow to import too
DEGREE_MAX = 341  # of index.py
TOP_M_MAX = 512  # of admission.py
SHARDS_MAX = 1_024  # of schemas/retrieval.py
TASKS_MAX = 4_096  # of slots.py
METRICS = ("sqeuclidean", "inner_product", "cosine")  # of metrics.py, whose import takes a second

_AT_LEAST = {
    "degree": 2,
    "top_m": 1,
    "width": 1,
    "patience": 0,
    "places": 1,
    "gather_min": 1,
    "queue_max": 1,
    "parked_max": 0,
    "global_flush_ms": 0,
    "share_gain": 0,
    "flush_gain": 0,
    "dead_band": 0,
    "share_step_max": 0,
    "link_weight": 0,
    "wait_weight": 0,
    "stall_weight": 0,
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
    patience: int = 0  # extends without change after which a search stops, likewise; 0: never
    places: int = 12  # searches that a core advances together; of device cpu, as slots are
    slots: int = 32  # of a core: places, and room for searches that gave theirs away
    # Half of the places for prefill, and 5 ms, missed four times as many deadlines: a prefill
    # search takes a place in time by its slack (LOG.md, "What the reserved share costs").
    share: float = 0.0  # of free places, reserved for prefill, until the control loop moves it
    flush_ms: float = 50.0  # the longest that a prefill search waits, until the loop moves it
    gather_min: int = 1  # searches that are admitted together where places are free
    global_flush_ms: float = 20.0  # the longest that any search waits for others to gather
    queue_max: int = 4_096  # waiting searches of a class
    parked_max: int = 64
    drops_late: bool = False  # refuse prefill searches that can no longer meet their deadline
    control_interval_ms: int = 300
    link_target_bytes_per_s: float = 0.0  # of all KV moved between workers; 0: not watched
    wait_target_ms: float = 20.0  # prefill's wait for a slot, 95th percentile
    stall_target: float = 0.2  # share of decode time that waits for retrievals
    link_weight: float = 1.0  # of each signal's excess over its target
    wait_weight: float = 1.0
    stall_weight: float = 1.0
    share_gain: float = 0.1  # of the share, per error
    flush_gain: float = 0.3  # of the flush timeout's logarithm
    share_min: float = 0.0
    share_max: float = 0.9
    flush_min_ms: float = 0.2
    flush_max_ms: float = 50.0
    dead_band: float = 0.1  # of the error
    share_step_max: float = 0.1  # slew: of one move
    flush_factor_max: float = 2.0  # likewise
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
        if self.slots < self.places or self.slots & (self.slots - 1):
            raise ConfigError(
                f"retrieval.slots: expected a power of two, and at least retrieval.places "
                f"({self.places}), found {self.slots}"
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

        return SchedulerSettings(**self._like(SchedulerSettings))

    def control(self) -> ControlSettings:
        """The control loop's part."""
        return ControlSettings(interval_ms=self.control_interval_ms, **self._like(ControlSettings))

    def _like(self, kind: Any) -> dict[str, Any]:
        """Settings that another class has under the same names."""
        ours = {each.name for each in fields(self)}
        return {each.name: getattr(self, each.name) for each in fields(kind) if each.name in ours}


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
        if slash and shard.isdecimal() and shards.isdecimal():
            found = cls(int(shard), int(shards))
            if found.shard < found.shards <= SHARDS_MAX:
                return found
        raise ConfigError(
            f"--shard: expected SHARD/SHARDS with shards counted from 0, as in 0/2, and at most "
            f"{SHARDS_MAX} of them, found {text!r:.80}"
        )
