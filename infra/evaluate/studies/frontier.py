"""Weights move `learned` along the frontier between TTFT and TPOT, on the grid.

Figure 5 in its own set-up is `weighing.py`. Each mark is the mean over workloads and
loads of one ratio, relative to x=0 at the same point.
"""

from dataclasses import dataclass

import numpy as np

from infra.evaluate.paper.grid import SHARES, WORKLOADS, Config, static
from infra.evaluate.points.paper_tables import Points
from infra.evaluate.points.point import Point, Spec
from infra.evaluate.points.runs import Runner, points_of

POOLS = "2P2D"
WEIGHTS = ((1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """TTFT and TPOT relative to x=0."""

    name: str
    ttft: float
    tpot: float
    local_share: float


def marks(runner: Runner, points: Points, seed: int) -> list[Mark]:
    """The fixed shares, from the grid's points, and `learned` with each pair of weights."""
    loads = tuple(points.loads[1::3])
    reference = points.of(static(POOLS, "0"), loads)
    found = [
        _mark(f"x={share}", points.of(static(POOLS, share), loads), reference) for share in SHARES
    ]
    learned = Config(pools=POOLS, policy="learned")
    specs = [
        Spec(config=learned, workload=workload, loads_per_s=loads, seed=seed, weights=weights)
        for weights in WEIGHTS
        for workload in WORKLOADS
        if workload in points.workloads
    ]
    runs = runner.map("weights", points_of, specs)
    each = len(points.workloads)
    for i, (w_ttft, w_tpot) in enumerate(WEIGHTS):
        mine = [point for run in runs[i * each : (i + 1) * each] for point in run]
        found.append(_mark(f"learned {w_ttft:g}/{w_tpot:g}", mine, reference))
    return found


def _mark(name: str, mine: list[Point], reference: list[Point]) -> Mark:
    pairs = list(zip(mine, reference, strict=True))
    return Mark(
        name=name,
        ttft=float(np.mean([a.cost_ttft / b.cost_ttft for a, b in pairs])),
        tpot=float(np.mean([a.cost_tpot / b.cost_tpot for a, b in pairs])),
        local_share=sum(a.local for a in mine) / max(1, sum(a.later for a in mine)),
    )
