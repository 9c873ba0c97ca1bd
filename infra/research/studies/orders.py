"""Remote turns in vLLM's default order, compared with all three orders, on a part of the grid.

With `prefill_first` alone, decode waits for the prompt, and prefill computes again the history that
decode has cached. With all three, turns whose history is cached at decode run `decode_first`, which
reads that history back, and others run `concurrent`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from infra.planning.grid import RATIOS, SHARES, Config, Workload, static
from infra.planning.runs import Points, Runner, specs_of
from infra.research.paper.paper_tables import change_by_level
from infra.research.studies.regret import cost

LOADS_PER_S = (1.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderComparison:
    """One ratio with one set of orders; changes in percent, costs relative to x=0."""

    pools: str
    all_orders: bool
    ttft_x0: dict[float, float]  # by load: mean of later turns, ms
    ttft_x1: dict[float, float]
    change: dict[str, float]  # of TTFT from x=0 to x=1 by level of load, median
    kv_bytes_x0: int  # KV bytes moved
    learned: float  # mean cost
    best_x: str
    best: float  # mean cost of the best single x
    regret: float  # of `learned`: mean over points


def points_in_all_orders(
    runner: Runner, workloads: Sequence[Workload], loads: Sequence[float], seed: int
) -> Points:
    """Run every fixed share and `learned` with all orders, at these loads."""
    configs = [
        config
        for pools in RATIOS
        for config in (*_shares(pools, all_orders=True), _learned(pools, all_orders=True))
    ]
    return Points(runner.points("all orders", specs_of(configs, workloads, loads, seed)))


def compare_orders(points: Points, in_all_orders: Points) -> list[OrderComparison]:
    """Compare the default order with all orders, for every ratio at the same loads."""
    return [
        _compare_order(pools, source, in_all_orders.loads, all_orders=all_orders)
        for pools in RATIOS
        for all_orders, source in ((False, points), (True, in_all_orders))
    ]


def _shares(pools: str, *, all_orders: bool) -> list[Config]:
    return [replace(static(pools, share), all_orders=all_orders) for share in SHARES]


def _learned(pools: str, *, all_orders: bool) -> Config:
    return Config(pools=pools, policy="learned", all_orders=all_orders)


def _compare_order(
    pools: str, points: Points, loads: Sequence[float], *, all_orders: bool
) -> OrderComparison:
    shares = _shares(pools, all_orders=all_orders)
    x0, x1 = shares[0], shares[-1]
    costs = {
        config: np.array(
            [
                cost(point, base)
                for point, base in zip(
                    points.select(config, loads), points.select(x0, loads), strict=True
                )
            ]
        )
        for config in (*shares, _learned(pools, all_orders=all_orders))
    }
    learned = costs.pop(_learned(pools, all_orders=all_orders))
    best = min(costs, key=lambda config: float(np.mean(costs[config])))
    return OrderComparison(
        pools=pools,
        all_orders=all_orders,
        ttft_x0=_ttft(points, x0, loads),
        ttft_x1=_ttft(points, x1, loads),
        change=change_by_level(points, x0, x1, lambda point: point.ttft, loads),
        kv_bytes_x0=sum(point.kv_bytes for point in points.select(x0, loads)),
        learned=float(np.mean(learned)),
        best_x=best.share,
        best=float(np.mean(costs[best])),
        regret=float(np.mean(learned / np.min(list(costs.values()), axis=0) - 1)),
    )


def _ttft(points: Points, config: Config, loads: Sequence[float]) -> dict[float, float]:
    return {
        load: float(np.mean([point.ttft for point in points.select(config, [load])]))
        for load in loads
    }
