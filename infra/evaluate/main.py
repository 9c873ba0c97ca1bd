"""The whole evaluation: grid, tables, regret, step change, many turns, weights, real traffic.

Results are one tree of dataclasses; `infra/evaluate/report.py` shows it. Called by `trivium
evaluate`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.evaluate import (
    bars,
    failures,
    frontier,
    interference,
    many_turns,
    margins,
    planning,
    regret,
    sharegpt,
    step_change,
    tables,
    weighing,
)
from infra.evaluate.bars import Bar
from infra.evaluate.frontier import Mark
from infra.evaluate.grid import (
    CONFIGS,
    DURATION_MS,
    LOADS_PER_S,
    OURS,
    RATIOS,
    TIMEOUT_MS,
    WORKLOADS,
    Config,
    Workload,
)
from infra.evaluate.many_turns import Length
from infra.evaluate.point import SETUP, Point, Spec
from infra.evaluate.regret import Regret
from infra.evaluate.runs import Runner, points_of, runner
from infra.evaluate.sharegpt import Served
from infra.evaluate.step_change import Recovery
from infra.evaluate.tables import Points
from infra.evaluate.traffic import Traffic, traffic
from infra.evaluate.weighing import Weighed
from infra.simulator.machine.latency import Setup

APPENDS = (16, 32, 64, 128, 256, 512, 1_024, 2_048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of the grid is run."""

    workloads: Sequence[Workload]
    loads_per_s: tuple[float, ...]
    turns: tuple[int, ...]
    step_seeds: int  # of the step change


WHOLE = Size(workloads=WORKLOADS, loads_per_s=LOADS_PER_S, turns=many_turns.TURNS, step_seeds=8)
QUICK = Size(
    workloads=[WORKLOADS[i] for i in (0, 8, 9, 11, 14, 17)],
    loads_per_s=(1.0, 6.0, 16.0),
    turns=(2, 8),
    step_seeds=4,
)


@dataclass(slots=True, kw_only=True)
class Results:
    """Everything that was found. Changes are percent, times ms, regrets shares."""

    seed: int
    quick: bool
    setup: Setup
    runs: int = 0
    seconds: float = 0.0
    duration_ms: float = DURATION_MS
    timeout_ms: int = TIMEOUT_MS
    table_1: list[tables.Cell] = field(default_factory=list)
    trends: dict[str, bool] = field(default_factory=dict)
    table_2: list[tables.Wins] = field(default_factory=list)
    trends_2: dict[str, bool] = field(default_factory=dict)
    why_2: str = ""
    unlike_winners: float = 0.0
    table_4: list[tables.Failures] = field(default_factory=list)
    sharegpt: list[Served] = field(default_factory=list)
    trends_4: dict[str, bool] = field(default_factory=dict)
    why_4: list[str] = field(default_factory=list)
    headline: list[tables.Headline] = field(default_factory=list)
    interference: dict[str, float] = field(default_factory=dict)
    appends: list[tuple[int, float]] = field(default_factory=list)
    regret: list[Regret] = field(default_factory=list)
    recovery: list[Recovery] = field(default_factory=list)
    lengths: list[Length] = field(default_factory=list)
    frontier: list[Mark] = field(default_factory=list)
    weighed: list[Weighed] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    traffic_skipped: str = ""
    bars: list[Bar] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)


def evaluate(*, quick: bool, seed: int, jobs: int, traces: Path | None) -> Results:
    """Run it all. Without a folder of traces that part is skipped."""
    began_s = time.monotonic()
    size, setup = QUICK if quick else WHOLE, SETUP
    results = Results(seed=seed, quick=quick, setup=setup)
    with runner(jobs) as pool:
        points = _grid(pool, size, seed)
        results.points = list(points.by_key.values())
        results.sharegpt = sharegpt.served(pool, seed, quick=quick)
        results.recovery = step_change.step_changes(pool, seed, size.step_seeds)
        results.lengths = many_turns.lengths(pool, size.turns, seed)
        results.frontier = frontier.marks(pool, points, seed)
        results.weighed = weighing.weighed(pool, seed, quick=quick)
        if traces is None:
            results.traffic_skipped = "no folder of traces: name one with --traces"
        else:
            results.traffic = traffic(pool, traces, seed, quick=quick)
    _fill(results, points, setup)
    results.runs = len(results.points)
    results.bars = bars.of(results)
    results.seconds = time.monotonic() - began_s
    return results


def _grid(pool: Runner, size: Size, seed: int) -> Points:
    """All configurations; `table` last, since its tables are made from what the others found."""

    def specs(configs: Sequence[Config]) -> list[Spec]:
        return [
            Spec(config=config, workload=workload, loads_per_s=size.loads_per_s, seed=seed)
            for workload in size.workloads
            for config in configs
        ]

    first = [config for config in (*CONFIGS, *OURS) if config.policy != "table"]
    found = [p for run in pool.map("grid", points_of, specs(first)) for p in run]
    points = Points(found)
    tabled = []
    for pools in RATIOS:
        table = planning.table_of(points, pools, planning.halves(seed, points)[0])
        config = Config(pools=pools, policy="table")
        tabled += [
            Spec(
                config=config,
                workload=workload,
                loads_per_s=size.loads_per_s,
                seed=seed,
                table=table,
            )
            for workload in size.workloads
        ]
    found += [p for run in pool.map("table", points_of, tabled) for p in run]
    return Points(found)


def _fill(results: Results, points: Points, setup: Setup) -> None:
    results.table_1 = tables.table_1(points)
    results.trends = tables.trends(results.table_1)
    results.table_2 = tables.table_2(points)
    results.trends_2 = tables.trends_2(results.table_2)
    results.why_2 = margins.explanation(points)
    results.unlike_winners = tables.unlike_winners(points)
    results.table_4 = tables.table_4(points, (*CONFIGS, *OURS))
    results.trends_4, results.why_4 = failures.trends(
        results.table_4, results.sharegpt, results.lengths
    )
    results.headline = tables.headline(points)
    results.interference = interference.slow_downs(setup)
    results.appends = interference.by_length(setup, APPENDS)
    test = planning.halves(results.seed, points)[1]
    for pools in RATIOS:
        results.regret += regret.rows(points, pools, test)
