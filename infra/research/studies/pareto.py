"""Figures 1 and 8: the Pareto front of TTFT p99 against tokens/s.

A configuration is at the front if no other one has both a lower TTFT and more tokens/s. All are
plain: conversations assigned by hash, clients that see the decode worker only. Figure 8 shows the
grid's points at three loads, as means over the workloads of a kind, with dynamic PPD. Figure 1 has
its own runs, of conversations of five turns with 10 000 prompt tokens in all and 100 answer tokens
in each turn. The paper does not say how the 10 000 are spread; its servers take at most 8 192
tokens, so it is not 10 000 in each turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import CONFIGS, LEVELS, RATIOS, Config, Workload
from infra.planning.point import Point, Spec
from infra.planning.runs import Points, Runner, points_of, specs_of
from infra.simulator.traffic.poisson import Profile, TurnShape
from streams.core.placement.ppd_table import PpdTable

LOADS_PER_S = (2.0, 8.0, 20.0)  # of figure 8, if the grid has them
FIGURE_1_LOADS_PER_S = (1.0, 4.0, 12.0)  # one load of each level; the paper gives none
TURNS, ASKED_TOKENS, ANSWERED_TOKENS = 5, 2_000, 100  # of each turn
_TURN = TurnShape(input_tokens=ASKED_TOKENS, output_tokens=ANSWERED_TOKENS)
LONG = Workload(
    name="five turns of 2 000",
    profile=Profile(first=_TURN, later=_TURN, turns=TURNS, think_ms=0.0),
)
PURE = tuple(config for config in CONFIGS if config.kind != "hybrid")  # figure 1 has ten
DYNAMIC = tuple(Config(pools=pools, policy="table", plain=True) for pools in RATIOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One configuration among those that serve the same conversations."""

    figure: str
    among: str  # kind of workload and load
    config: str
    is_local: bool  # whether all later turns are computed on decode workers
    ttft_p99: float  # ms, of later turns
    tokens_per_s: float
    failed: int
    at_front: bool


def dynamic(
    runner: Runner,
    tables: dict[str, PpdTable],
    workloads: Sequence[Workload],
    loads: Sequence[float],
    seed: int,
) -> list[Point]:
    """Run dynamic PPD on the grid, at the loads of figure 8."""
    return runner.points("dynamic PPD", _dynamic_specs(tables, workloads, loads, seed))


def _dynamic_specs(
    tables: dict[str, PpdTable], workloads: Sequence[Workload], loads: Sequence[float], seed: int
) -> list[Spec]:
    """Return specs that give each ratio its own table."""
    return [
        spec
        for config in DYNAMIC
        for spec in specs_of([config], workloads, loads, seed, tables[config.pools])
    ]


def loads_of(points: Points) -> list[float]:
    """Return the loads of figure 8, or else one load of each level."""
    if all(load in points.loads for load in LOADS_PER_S):
        return list(LOADS_PER_S)
    levels = ([load for load in level if load in points.loads] for level in LEVELS.values())
    return [level[-1] for level in levels if level]


def figure_8(points: Points, dynamic_points: Points) -> list[ParetoPoint]:
    """Return every configuration by kind of workload and load."""
    rows = []
    for kind in ("decode-heavy", "balanced", "prefill-heavy"):
        names = [workload.name for workload in points.workloads if workload.kind == kind]
        for load in dynamic_points.loads if names else ():
            rivals = {
                config: [source[config, name, load] for name in names]
                for configs, source in ((PURE, points), (DYNAMIC, dynamic_points))
                for config in configs
            }
            rows += _pareto_points("8", f"{kind}, {load:g}/s", rivals)
    return rows


def figure_1(runner: Runner, tables: dict[str, PpdTable], seed: int) -> list[ParetoPoint]:
    """Run all ten configurations and dynamic PPD at each load."""
    specs = specs_of(PURE, [LONG], FIGURE_1_LOADS_PER_S, seed)
    specs += _dynamic_specs(tables, [LONG], FIGURE_1_LOADS_PER_S, seed)
    runs = runner.map("figure 1", points_of, specs)
    rows = []
    for number, load in enumerate(FIGURE_1_LOADS_PER_S):
        rivals = {run[number].config: [run[number]] for run in runs}
        rows += _pareto_points("1", f"{load:g}/s", rivals)
    return rows


def _pareto_points(figure: str, among: str, rivals: dict[Config, list[Point]]) -> list[ParetoPoint]:
    """Return the points of all configurations; one that loses a request is never at the front."""
    figures = {
        config: (
            float(np.mean([point.decode_ttft_p99 for point in points])),
            float(np.mean([point.tokens_per_s for point in points])),
        )
        for config, points in rivals.items()
    }
    failed = {config: sum(point.failed for point in points) for config, points in rivals.items()}
    pairs = [pair for config, pair in figures.items() if not failed[config]]
    return [
        ParetoPoint(
            figure=figure,
            among=among,
            config=config.name,
            is_local=config.kind == "x=1",
            ttft_p99=ttft_p99,
            tokens_per_s=tokens_per_s,
            failed=failed[config],
            at_front=not failed[config]
            and not any(rival[0] < ttft_p99 and rival[1] > tokens_per_s for rival in pairs),
        )
        for config, (ttft_p99, tokens_per_s) in figures.items()
    ]
