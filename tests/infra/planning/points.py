"""Made-up points of the grid."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from infra.planning.grid import LOADS_PER_S, WORKLOADS, Config
from infra.planning.point import Point

LOADS = (1.0, 8.0)
PART = WORKLOADS[:2]


def point(config: Config, workload: str, load: float, **figures: float) -> Point:
    """A point with 100 ms and 10 ms, unless it says otherwise."""
    base = Point(
        config=config,
        workload=workload,
        load_per_s=load,
        requests=10,
        failed=0,
        later=5,
        ttft=100.0,
        decode_ttft=100.0,
        decode_tpot=10.0,
        every_decode_tpot=10.0,
        cost_ttft=100.0,
        cost_tpot=10.0,
        kv_bytes=1_000,
        later_kv_bytes=500,
    )
    return replace(base, **figures)  # type: ignore[arg-type]  # numbers by name


def every(config: Config, **figures: float) -> Iterator[Point]:
    """The same point for every workload and load."""
    for workload, load in product(WORKLOADS, LOADS_PER_S):
        yield point(config, workload.name, load, **figures)


def on_part(config: Config, **figures: float) -> Iterator[Point]:
    for workload, load in product(PART, LOADS):
        yield point(config, workload.name, load, **figures)
