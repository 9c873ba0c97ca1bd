"""Section [retrieval] of the settings: what a retrieval worker holds, and how it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from schemas.errors import ConfigError
from schemas.rules.sizes import SHARDS_MAX
from schemas.sections import Natural, NonNegative, Positive, Share, Texts, one_of, section
from workers.search.engine.control import ControlSettings
from workers.search.engine.scheduler import SchedulerSettings
from workers.search.kernels.metrics import Metric
from workers.search.limits import DEGREE, DEGREE_MAX, DEVICES, PLACES, SLOTS, TASKS_MAX, TOP_M_MAX


@section("retrieval")
class RetrievalSettings:
    """Of every retrieval worker; which shard it holds is told on its command line."""

    metrics: Texts = ()  # "collection=metric"; other collections are cosine
    # where searches run; cuda needs CuPy, auto takes cuda where it can
    device: Annotated[str, one_of(*DEVICES)] = "cpu"
    degree: Annotated[int, Field(ge=2, le=DEGREE_MAX)] = DEGREE  # edges of a row in the graph
    # length of the routing list where a retrieval names none
    top_m: Annotated[int, Field(ge=1, le=TOP_M_MAX)] = 64
    width: Positive = 1  # entries expanded per extend where a retrieval names none
    collections_max: Positive = 256
    pending_max: Positive = 4_096  # retrievals taken and not acknowledged; then the log waits
    # extends without change after which a search stops, likewise; 0: never
    patience: Natural = 0
    places: Positive = PLACES  # searches that a core advances together; of device cpu, as slots are
    slots: int = SLOTS  # of a core: places, and room for searches that gave theirs away
    # Half of the places for prefill, and 5 ms, missed four times as many deadlines: a prefill
    # search takes a place in time by its slack (LOG.md, "What the reserved share costs").
    share: Share = 0.0  # of free places, reserved for prefill, until the control loop moves it
    # the longest that a prefill search waits, until the loop moves it
    flush_ms: NonNegative = 50.0
    gather_min: Positive = 1  # searches that are admitted together where places are free
    # the longest that any search waits for others to gather
    global_flush_ms: NonNegative = 20.0
    queue_max: Positive = 4_096  # waiting searches of a class
    parked_max: Natural = 64
    drops_late: bool = False  # refuse prefill searches that can no longer meet their deadline
    control_interval_ms: Positive = 300
    # of all KV moved between workers; 0: not watched
    link_target_bytes_per_s: NonNegative = 0.0
    wait_target_ms: float = 20.0  # prefill's wait for a slot, 95th percentile
    stall_target: float = 0.2  # share of decode time that waits for retrievals
    link_weight: NonNegative = 1.0  # of each signal's excess over its target
    wait_weight: NonNegative = 1.0
    stall_weight: NonNegative = 1.0
    share_gain: NonNegative = 0.1  # of the share, per error
    flush_gain: NonNegative = 0.3  # of the flush timeout's logarithm
    share_min: float = 0.0
    share_max: float = 0.9
    flush_min_ms: float = 0.2
    flush_max_ms: float = 50.0
    dead_band: NonNegative = 0.1  # of the error
    share_step_max: NonNegative = 0.1  # slew: of one move
    flush_factor_max: float = 2.0  # likewise
    upkeep_interval_ms: Positive = 500  # between looks for documents to link
    compact_share: NonNegative = 0.2  # of deleted rows, from which an index is compacted
    snapshot_folder: str = ""  # empty: no snapshots, an index is rebuilt from `documents`
    snapshot_interval_s: Positive = 300
    drain_timeout_ms: Natural = 10_000
    close_timeout_ms: Positive = 10_000

    def __post_init__(self) -> None:
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
        for each in self.metrics:
            name, _, metric = each.partition("=")
            if not name or metric not in set(Metric):
                raise ConfigError(
                    f"retrieval.metrics: expected collection=metric with a metric of "
                    f"{', '.join(Metric)}, found {each!r}"
                )
        self.control()

    def metric_of(self, collection: str) -> str:
        """What a collection's distances are."""
        named: Mapping[str, str] = dict(each.split("=", 1) for each in self.metrics)
        return named.get(collection, "cosine")

    def scheduler(self) -> SchedulerSettings:
        """The queues' part."""
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
