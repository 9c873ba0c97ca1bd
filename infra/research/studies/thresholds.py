"""Dynamo's rule with other thresholds, tuned for each load, for a fair comparison.

`conditional` has two thresholds: the most prompt tokens that the decode worker computes itself, and
the prefill queue from which it does so. Each of some pairs is run on a part of the grid. A pair is
chosen for all loads of a ratio, or for each load, by the mean regret there: in hindsight, on the
same points that it is then judged by, which flatters it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import RATIOS, SHARES, Config, Workload, static
from infra.planning.runs import Points, Runner, specs_of
from infra.research.studies.regret import cost

CANDIDATES: tuple[tuple[int, float], ...] = (
    (100, 2.0),
    (500, 2.0),
    (2_500, 2.0),
    (100, 0.5),
    (500, 0.5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdResult:
    """Mean regrets of one ratio, as shares."""

    pools: str
    default: float
    one_pair: float
    pair: str  # as tokens/requests
    per_load: float
    pairs: dict[float, str]  # by load
    learned: float  # over the same points


def points_of_candidates(
    runner: Runner, workloads: Sequence[Workload], loads: Sequence[float], seed: int
) -> Points:
    """Run all pairs of thresholds but the default one, at these loads."""
    configs = [config for pools in RATIOS for config in _configs(pools)]
    return Points(runner.points("thresholds", specs_of(configs, workloads, loads, seed)))


def tune_thresholds(points: Points, candidates: Points) -> list[ThresholdResult]:
    """Find the best thresholds of every ratio."""
    return [_tune_ratio(points, candidates, pools) for pools in RATIOS]


def _configs(pools: str) -> list[Config]:
    return [
        Config(pools=pools, policy="conditional", thresholds=thresholds)
        for thresholds in CANDIDATES
    ]


def _tune_ratio(points: Points, candidates: Points, pools: str) -> ThresholdResult:
    loads = candidates.loads
    default = Config(pools=pools, policy="conditional")
    regrets = {"default": _regrets(points, points, default, loads)}
    for config in _configs(pools):
        assert config.thresholds is not None
        tokens, requests = config.thresholds
        regrets[f"{tokens}/{requests:g}"] = _regrets(points, candidates, config, loads)
    pair = min(regrets, key=lambda name: float(np.mean(list(regrets[name].values()))))
    pairs = {load: min(regrets, key=lambda name: regrets[name][load]) for load in loads}
    learned = _regrets(points, points, Config(pools=pools, policy="learned"), loads)
    return ThresholdResult(
        pools=pools,
        default=float(np.mean(list(regrets["default"].values()))),
        one_pair=float(np.mean(list(regrets[pair].values()))),
        pair=pair,
        per_load=float(np.mean([regrets[pairs[load]][load] for load in loads])),
        pairs=pairs,
        learned=float(np.mean(list(learned.values()))),
    )


def _regrets(
    points: Points, source: Points, config: Config, loads: Sequence[float]
) -> dict[float, float]:
    """Return the mean regret over the workloads, by load."""
    mean_regrets = {}
    for load in loads:
        fixed = [points.select(static(config.pools, share), [load]) for share in SHARES]
        load_points = source.select(config, [load])
        mean_regrets[load] = float(
            np.mean(
                [
                    cost(point, x0) / min(cost(rival, x0) for rival in (x0, *rivals)) - 1
                    for point, x0, *rivals in zip(load_points, *fixed, strict=True)
                ]
            )
        )
    return mean_regrets
