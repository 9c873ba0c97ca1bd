"""Section [retrieval] of the settings: what a retrieval worker holds, and how it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import Field

from schemas.errors import ConfigError
from schemas.rules.sizes import SHARDS_MAX
from schemas.sections import Natural, NonNegative, Positive, Share, Texts, one_of, section
from workers.search.engine.control import ControlSettings
from workers.search.engine.scheduler import SchedulerSettings
from workers.search.kernels.metrics import Metric
from workers.search.limits import DEGREE, DEGREE_MAX, DEVICES, PLACES, SLOTS, TASKS_MAX, TOP_M_MAX


@section("retrieval")
class RetrievalSettings(ControlSettings):
    """Of every retrieval worker; which shard it holds is told on its command line.

    What may move `share` and `flush_ms` is in `ControlSettings`.
    """

    # whether the control loop runs; off, for share and flush_ms as they are miss less
    is_controlled: bool = False
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
        ControlSettings.__post_init__(self)

    def metric_of(self, collection: str) -> str:
        """What a collection's distances are."""
        named: Mapping[str, str] = dict(each.split("=", 1) for each in self.metrics)
        return named.get(collection, "cosine")

    def scheduler(self) -> SchedulerSettings:
        """The queues' part: what has the same name here."""
        ours = {each.name for each in fields(self)}
        shared = [each.name for each in fields(SchedulerSettings) if each.name in ours]
        return SchedulerSettings(**{name: getattr(self, name) for name in shared})


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
