"""How far a policy is from the best fixed share of local turns, point by point.

The cost of a point is

    J = w_ttft * TTFT / TTFT_0 + w_tpot * TPOT / TPOT_0

with the mean time to first token of the later turns and the mean time per token of all turns, as
clients see them. TTFT_0 and TPOT_0 are those of x=0 at the same point. Turns that failed, or
were never sent because an earlier one failed, count with the timeout (30 s) and the timeout per
token. Every policy meets the same arrivals. A point's regret is J over the least J of
x in {0, 1/3, 1/2, 2/3, 1} at that point, minus 1; it is negative where a policy beats them all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import SHARES, Config, static
from infra.planning.point import Point
from infra.planning.runs import Points

WEIGHTS = (0.5, 0.5)
REGRET_MAX = 0.05


def cost(point: Point, reference: Point, weights: tuple[float, float] = WEIGHTS) -> float:
    """Return the cost J of a point relative to a reference."""
    w_ttft, w_tpot = weights
    ttft = point.cost_ttft / reference.cost_ttft
    return w_ttft * ttft + w_tpot * point.cost_tpot / reference.cost_tpot


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """A row: one policy over the points of one P:D ratio."""

    config: str
    points: int
    mean_cost: float
    mean_regret: float
    p90_regret: float
    worst_regret: float
    worst_at: str
    failed: int
    failed_best: int  # sum over points of the fewest failures of any x
    missed: int  # points at which it loses requests and some x loses none
    local_share: float


def regrets(
    points: Points, pools: str, config: Config, use: Iterable[tuple[str, float]] | None = None
) -> Regret:
    """Compute the regret over some of the points of a ratio, or all."""
    chosen = (
        list(use)
        if use is not None
        else [(workload.name, load) for workload in points.workloads for load in points.loads]
    )
    costs, point_regrets = [], []
    failed = failed_best = missed = local = later = 0
    for workload, load in sorted(chosen):
        fixed = [points[static(pools, share), workload, load] for share in SHARES]
        best_cost = min(cost(p, fixed[0]) for p in fixed)
        point = points[config, workload, load]
        costs.append(cost(point, fixed[0]))
        point_regrets.append((costs[-1] / best_cost - 1, f"{workload} at {load:g}/s"))
        failed += point.failed
        fewest = min(p.failed for p in fixed)
        failed_best += fewest
        missed += point.failed > 0 and not fewest
        local, later = local + point.local, later + point.later
    values = [value for value, _ in point_regrets]
    worst, worst_at = max(point_regrets)
    return Regret(
        config=config.name,
        points=len(values),
        mean_cost=float(np.mean(costs)),
        mean_regret=float(np.mean(values)),
        p90_regret=float(np.percentile(values, 90)),
        worst_regret=worst,
        worst_at=worst_at,
        failed=failed,
        failed_best=failed_best,
        missed=missed,
        local_share=local / max(1, later),
    )


def rows(points: Points, pools: str, test: Iterable[tuple[str, float]]) -> list[Regret]:
    """Return the regret of every fixed share and policy; the table is judged on the test half
    only."""
    configs = [static(pools, share) for share in SHARES]
    configs += [Config(pools=pools, policy=name) for name in ("conditional", "learned")]
    regret_rows = [regrets(points, pools, config) for config in configs]
    return [*regret_rows, regrets(points, pools, Config(pools=pools, policy="table"), test)]
