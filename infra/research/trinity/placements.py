"""Trinity's figure 2 as numbers of GPUs: where copies of the index are, and who uses them.

Theory of operation. All placements have the same GPUs. (a) gives each `workers_a_copy` LLM workers
a GPU (or more, by shards) with a copy of the index beside them; `in_place` puts that copy into the
LLM workers' own memory, which takes no GPU but time. (b) has copies beside prefill workers only,
and a pool of copies for decode. (c) has one pool for all. A worker calls a copy in its own node
directly, and reaches all others over the log. The remaining GPUs are LLM workers, split between
prefill and decode so that most requests are served (`pools.py`).
"""

import math
from dataclasses import dataclass

from infra.planning.hardware import NODE_GPUS, SearchCosts
from infra.planning.pools import TrafficModel, split
from infra.scaling.queueing import BUSY_MAX
from infra.simulator.machine.latency import Setup
from schemas.errors import ConfigError

WORKERS_MAX = 16  # LLM workers of a simulated cluster: partitions of a work topic
LOCAL_MS = 0.05  # a call inside a node, one way (assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementKind:
    """One of the paper's placements."""

    name: str
    beside: str  # which workers have copies beside them: all, prefill, none
    workers_a_copy: int = 1
    in_place: bool = False


COUPLED = PlacementKind(name="a, one each", beside="all")
SHARED = PlacementKind(name="a, four share", beside="all", workers_a_copy=4)
IN_PLACE = PlacementKind(name="a, in place", beside="all", in_place=True)
WITH_PREFILL = PlacementKind(name="b", beside="prefill", workers_a_copy=4)
POOL = PlacementKind(name="c", beside="none")
KINDS = (COUPLED, SHARED, IN_PLACE, WITH_PREFILL, POOL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLayout:
    """Workers and copies of a placement on a number of GPUs."""

    kind: PlacementKind
    prefill: int  # LLM workers
    decode: int
    coupled: int  # copies beside LLM workers
    pooled: int  # copies in a pool
    gpus: int
    per_s: float  # most requests/s, by the estimates of `pools.py`

    @property
    def copies(self) -> int:
        return self.coupled + self.pooled


def lay_out(
    kind: PlacementKind,
    gpus: int,
    degree: int,
    worker: Setup,
    search: SearchCosts,
    traffic: TrafficModel,
    tpot_ms: float,
) -> PlacementLayout:
    """Return the placement with the most LLM workers on `gpus` GPUs; raises ConfigError if none
    fits."""
    for workers in range(min(WORKERS_MAX, gpus // degree), 1, -1):
        prefill, per_s = split(worker, traffic, workers, tpot_ms)
        copies, pooled = _copies(kind, prefill, workers - prefill, search, traffic)
        coupled_gpus = 0 if kind.in_place else search.shards * copies
        used = workers * degree + coupled_gpus + search.shards * pooled
        if used <= gpus:
            return PlacementLayout(
                kind=kind, prefill=prefill, decode=workers - prefill, coupled=copies,
                pooled=pooled, gpus=used, per_s=per_s,
            )  # fmt: skip
    raise ConfigError(
        f"placement {kind.name}: {gpus} GPUs hold no prefill and decode worker of {degree} GPUs "
        f"beside an index of {search.shards} shards a copy; take more GPUs, or a smaller index"
    )


def _copies(
    kind: PlacementKind, prefill: int, decode: int, search: SearchCosts, traffic: TrafficModel
) -> tuple[int, int]:
    """Return the copies beside workers and those in a pool."""
    if kind.in_place:
        return prefill + decode, 0
    beside = {"all": prefill + decode, "prefill": prefill, "none": 0}[kind.beside]
    copies = max(1, round(beside / kind.workers_a_copy)) if beside else 0
    rates = {"all": 0.0, "prefill": traffic.probes, "none": traffic.probes + traffic.searched}
    rate = traffic.per_s * rates[kind.beside]
    spare_per_s = BUSY_MAX * search.searches_per_s - traffic.updates_per_s
    if spare_per_s <= 0:
        raise ConfigError(
            f"{traffic.updates_per_s:g} updates/s keep a copy of the index busy alone"
        )
    return copies, math.ceil(rate / spare_per_s)


def crossing(kind: PlacementKind, degree: int, shards: int) -> int:
    """Return how many GPUs of one LLM worker are on another node, displaced by a copy of the
    index."""
    if kind.in_place or kind.beside == "none":
        return 0
    return max(0, degree + shards - NODE_GPUS)


def index_bytes(layout: PlacementLayout, search: SearchCosts) -> float:
    """Return the memory that all copies of the index take."""
    return layout.copies * search.index.total_bytes
