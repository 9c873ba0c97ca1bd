"""The whole evaluation: the paper's grid, tables and figures, and this project's own studies.

`report/whole_page.py` writes the findings. Called by `trivium evaluate`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.planning import plan_table
from infra.planning.grid import (
    CONFIGS,
    LOADS_PER_S,
    OURS,
    RATIOS,
    WORKLOADS,
    Config,
    Workload,
)
from infra.planning.point import SETUP
from infra.planning.runs import Points, Runner, runner, specs_of
from infra.research.paper import paper_tables, ppd_paper
from infra.research.paper.conversations import SYNTHETIC, ConversationSource
from infra.research.report import bars
from infra.research.report.findings import EvaluationFindings
from infra.research.studies import (
    chats,
    failures,
    interference,
    many_turns,
    orders,
    pareto,
    regret,
    sensitivity,
    step_change,
    thresholds,
    weights,
)
from infra.research.studies.traffic import simulate_traces
from infra.simulator.machine.latency import Setup

APPENDS = (16, 32, 64, 128, 256, 512, 1_024, 2_048)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSize:
    """The part of the grid that is run."""

    workloads: Sequence[Workload]
    loads_per_s: tuple[float, ...]
    part: Sequence[Workload]  # for studies that run only a part of the grid
    part_loads_per_s: tuple[float, ...]
    turns: tuple[int, ...]
    step_seeds: int  # of the step change


_PART = [WORKLOADS[i] for i in (0, 8, 9, 11, 14, 17)]
WHOLE = GridSize(
    workloads=WORKLOADS,
    loads_per_s=LOADS_PER_S,
    part=_PART,
    part_loads_per_s=(1.0, 4.0, 8.0, 16.0),
    turns=many_turns.TURNS,
    step_seeds=8,
)
QUICK = GridSize(
    workloads=_PART,
    loads_per_s=(1.0, 6.0, 16.0),
    part=_PART[::3],
    part_loads_per_s=(1.0, 6.0),
    turns=(2, 8),
    step_seeds=4,
)


def evaluate(
    *,
    quick: bool,
    seed: int,
    jobs: int,
    traces: Path | None,
    sources: Sequence[ConversationSource] = SYNTHETIC,
) -> EvaluationFindings:
    """Run the evaluation, with conversations of `sources` for figures 4 and 5.

    Without a folder of traces, real traffic is skipped.
    """
    began_s = time.monotonic()
    size, setup = QUICK if quick else WHOLE, SETUP
    results = EvaluationFindings(seed=seed, quick=quick, setup=setup)
    with runner(jobs) as pool:
        points = _grid(pool, size, seed)
        results.points = list(points.by_key.values())
        _published(pool, results, points, size, sources)
        _policies(pool, results, points, size)
        results.recovery = step_change.step_changes(pool, seed, size.step_seeds)
        part = points.subset(size.part, points.loads)
        results.frontier = weights.frontier_points(pool, part, seed)
        if traces is None:
            results.traffic_skipped = "no folder of traces: name one with --traces"
        else:
            results.traffic = simulate_traces(pool, traces, seed, quick=quick)
    _fill(results, points, setup)
    results.runs = len(results.points)
    results.bars = bars.make_claims(results)
    results.seconds = time.monotonic() - began_s
    return results


def _published(
    pool: Runner,
    results: EvaluationFindings,
    points: Points,
    size: GridSize,
    sources: Sequence[ConversationSource],
) -> None:
    """Run the paper's figures that need runs of their own."""
    seed, quick = results.seed, results.quick
    pairs = [(workload.name, load) for workload in points.workloads for load in points.loads]
    tables = {pools: plan_table.table_of(points, pools, pairs, plain=True) for pools in RATIOS}
    results.places = pareto.figure_1(pool, tables, seed)
    dynamic = pareto.dynamic(pool, tables, size.workloads, pareto.loads_of(points), seed)
    results.places += pareto.figure_8(points, Points(dynamic))
    results.chats = chats.serve_chats(pool, tables, sources, seed, quick=quick)
    results.chat_changes = chats.changes(results.chats)
    results.weighed = weights.run_weights(pool, tables[weights.POOLS], sources, seed, quick=quick)
    results.lengths = many_turns.lengths(pool, size.turns, seed)
    results.models = many_turns.models(pool, seed)
    loads = size.part_loads_per_s
    results.varied = sensitivity.run_variations(pool, points, size.part, loads, seed)


def _policies(pool: Runner, results: EvaluationFindings, points: Points, size: GridSize) -> None:
    """Run the policies with other orders and other thresholds."""
    loads, seed = size.part_loads_per_s, results.seed
    part = points.subset(size.part, loads)
    in_all = orders.points_in_all_orders(pool, size.part, loads, seed)
    results.orders = orders.compare_orders(part, in_all)
    candidates = thresholds.points_of_candidates(pool, size.part, loads, seed)
    results.tuned = thresholds.tune_thresholds(part, candidates)


def _grid(pool: Runner, size: GridSize, seed: int) -> Points:
    """Run all configurations; `table` last, since its tables are made from the others' points."""
    part = (size.workloads, size.loads_per_s, seed)
    first = [config for config in (*CONFIGS, *OURS) if config.policy != "table"]
    grid_points = pool.points("grid", specs_of(first, *part))
    points = Points(grid_points)
    tabled, half = [], plan_table.halves(seed, points)[0]
    for pools in RATIOS:
        table = plan_table.table_of(points, pools, half)
        tabled += specs_of([Config(pools=pools, policy="table")], *part, table)
    grid_points += pool.points("table", tabled)
    return Points(grid_points)


def _fill(results: EvaluationFindings, points: Points, setup: Setup) -> None:
    results.table_1 = paper_tables.table_1(points)
    results.trends = paper_tables.trends(results.table_1)
    results.table_2 = paper_tables.table_2(points)
    results.trends_2 = paper_tables.trends_2(results.table_2)
    results.leads_2 = paper_tables.throughput_leads(points)
    results.unlike_winners = paper_tables.unlike_winners(points)
    results.table_4 = paper_tables.table_4(points, (*CONFIGS, *OURS))
    results.trends_4 = failures.trends(results.table_4)
    results.headline = paper_tables.headline(points)
    results.first_turns = paper_tables.first_turns(points)
    results.interference = interference.slow_downs(setup)
    results.contexts = interference.by_context(setup, ppd_paper.FIGURE_7_CONTEXTS)
    results.appends = interference.by_length(setup, APPENDS)
    test = plan_table.halves(results.seed, points)[1]
    for pools in RATIOS:
        results.regret += regret.rows(points, pools, test)
