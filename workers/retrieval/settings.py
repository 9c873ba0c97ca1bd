"""Section [retrieval] of the settings: indexes, search engine and snapshots of the workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from schemas.errors import ConfigError
from schemas.rules.sizes import COLLECTION_CHARS_MAX, SHARDS_MAX, is_collection
from schemas.sections import Natural, NonNegative, Positive, Share, Texts, one_of, section
from workers.vector.engine.scheduler import SchedulerSettings
from workers.vector.kernels.metrics import Metric, Storage
from workers.vector.limits import (
    AHEAD,
    BUILDERS,
    CUDA_DIM_MAX,
    CUDA_PLACES,
    CUDA_SLOTS_MAX,
    CUDA_TOP_M_MAX,
    DEGREE,
    DEGREE_MAX,
    DEVICES,
    LANES_MAX,
    PLACES,
    SLOTS,
    TOP_M_MAX,
)

SHARD_FIELD = "{shard}"  # in the path of an index file


@section("retrieval")
class RetrievalSettings:
    """Settings that every retrieval worker reads; its command line names its shard."""

    metrics: Texts = ()  # "collection=metric"; other collections are cosine
    # "collection=float16": how vectors are stored; other collections have float32
    storages: Texts = ()
    # "collection=path" of an index file that is served unchanged and takes no documents; {shard} in
    # a path stands for the number of the worker's shard
    index_files: Texts = ()
    # device of searches; cuda needs CuPy, auto takes cuda if it can be used
    device: Annotated[str, one_of(*DEVICES)] = "cpu"
    cuda_device: Natural = 0  # number among the visible devices
    # builder of the graph of an index on a CUDA device; cuvs needs cuVS
    builder: Annotated[str, one_of(*BUILDERS)] = "own"
    # searches that a device advances together; replaces lanes and places
    cuda_places: Annotated[int, Field(ge=1, le=CUDA_SLOTS_MAX // 2)] = CUDA_PLACES
    # most values of a vector that a device can search; memory of queries grows with it
    cuda_dim_max: Annotated[int, Field(ge=16, le=1 << 16, multiple_of=16)] = CUDA_DIM_MAX
    degree: Annotated[int, Field(ge=2, le=DEGREE_MAX)] = DEGREE  # edges of a row in the graph
    # length of the routing list if a retrieval names none
    top_m: Annotated[int, Field(ge=1, le=TOP_M_MAX)] = 64
    # "collection=0.95": the target recall of its searches if a retrieval names no top_m
    recalls: Texts = ()
    collections_max: Positive = 256
    # threads that search, and that build indexes at the start; 0: one per core
    lanes: Annotated[int, Field(ge=0, le=LANES_MAX)] = 0
    word_threads: Annotated[int, Field(ge=1, le=LANES_MAX)] = 2  # threads that search by words
    ahead: Natural = AHEAD  # searches that wait in a lane's slots for a place
    places: Positive = PLACES  # searches that a core advances together, on device cpu
    share: Share = 0.0  # of free places, reserved for prefill
    # wait after which a prefill search takes a decode search's place
    park_after_ms: NonNegative = 50.0
    gather_min: Positive = 1  # searches that are admitted together if places are free
    # longest wait of a prefill search for others to gather
    flush_ms: NonNegative = 5.0  # four times that for any search
    drops_late: bool = False  # refuse prefill searches that can no longer meet their deadline
    snapshot_folder: str = ""  # empty: no snapshots, an index is rebuilt from `documents`
    # all replicas of a shard share one folder in it: the first ready one writes, all read
    shares_snapshots: bool = False
    snapshot_interval_s: Positive = 300

    def __post_init__(self) -> None:
        if self.builder == "cuvs" and self.device == "cpu":
            raise ConfigError(
                "retrieval.builder: expected own with retrieval.device cpu, found cuvs, which "
                "needs a CUDA device"
            )
        if self.device != "cpu" and self.top_m > CUDA_TOP_M_MAX:
            raise ConfigError(
                f"retrieval.top_m: expected at most {CUDA_TOP_M_MAX} on device {self.device}, "
                f"found {self.top_m}"
            )
        if self.shares_snapshots and not self.snapshot_folder:
            raise ConfigError(
                "retrieval.shares_snapshots: expected a retrieval.snapshot_folder beside it, which "
                "all workers of a shard see"
            )
        _check_named("metric", self.metrics, [*Metric])
        _check_named("storage", self.storages, [*Storage])
        for pair in self.recalls:
            name, _, recall = pair.partition("=")
            if not name or not _is_recall(recall):
                raise ConfigError(
                    "retrieval.recalls: expected collection=recall with a recall above 0 and below "
                    f"1, found {pair!r}"
                )
        for pair in self.index_files:
            name, _, path = pair.partition("=")
            if not is_collection(name) or not path:
                raise ConfigError(
                    "retrieval.index_files: expected collection=path with a collection of 1 to "
                    f"{COLLECTION_CHARS_MAX} characters without a slash, found {pair!r}"
                )

    @property
    def slots(self) -> int:
        """Return how many searches a core holds: a power of two, with room for those in places, for
        those that wait, and as many parked ones."""
        return max(SLOTS, 1 << (self.places + 2 * self.ahead - 1).bit_length())

    @property
    def cuda_slots(self) -> int:
        """Return how many searches a device holds: as many parked ones as there are places."""
        return 2 * self.cuda_places

    def recall_of(self, collection: str) -> float:
        """Return the target recall of a collection's searches; 0: routing lists have `top_m`."""
        return _recalls(self.recalls).get(collection, 0.0)

    def metric_of(self, collection: str, default: str = "cosine") -> str:
        """Return the metric of a collection's distances."""
        return _split_pairs(self.metrics).get(collection, default)

    def files(self, shard: int) -> Mapping[str, Path]:
        """Return the index files of a shard, by collection."""
        paths = _split_pairs(self.index_files)
        return {name: Path(path.replace(SHARD_FIELD, str(shard))) for name, path in paths.items()}

    def storage_of(self, collection: str, default: str = "float32") -> str:
        """Return how a collection's vectors are stored."""
        return _split_pairs(self.storages).get(collection, default)

    def scheduler(self) -> SchedulerSettings:
        """Return the settings of the engine's scheduler; raises ConfigError."""
        return SchedulerSettings(
            share=self.share,
            park_after_ms=self.park_after_ms,
            gather_min=self.gather_min,
            flush_ms=self.flush_ms,
            global_flush_ms=4 * self.flush_ms,
            drops_late=self.drops_late,
        )


def _check_named(what: str, pairs: Sequence[str], choices: Sequence[str]) -> None:
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or value not in choices:
            raise ConfigError(
                f"retrieval.{what}s: expected collection={what} with a {what} of "
                f"{', '.join(choices)}, found {pair!r}"
            )


@cache
def _split_pairs(pairs: tuple[str, ...]) -> Mapping[str, str]:
    return dict(pair.split("=", 1) for pair in pairs)


def _is_recall(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


@cache
def _recalls(pairs: tuple[str, ...]) -> Mapping[str, float]:
    return {name: float(recall) for name, recall in _split_pairs(pairs).items()}


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """A shard's number and the number of shards; written 0/2."""

    shard: int
    shards: int

    def __str__(self) -> str:
        return f"{self.shard}/{self.shards}"

    @classmethod
    def parse(cls, text: str) -> "ShardPlace":
        """Return the shard that `text` names; raises ConfigError."""
        shard, slash, shards = text.partition("/")
        if slash and shard.isdecimal() and shards.isdecimal():
            place = cls(int(shard), int(shards))
            if place.shard < place.shards <= SHARDS_MAX:
                return place
        raise ConfigError(
            f"--shard: expected SHARD/SHARDS with shards counted from 0, as in 0/2, and at most "
            f"{SHARDS_MAX} of them, found {text!r:.80}"
        )
