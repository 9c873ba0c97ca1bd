"""PPD's table from simulated points: algorithm 1, phase 1.

Each workload and load is run with all later turns remote and with all of them local. A cell has the
gain in TTFT and the loss in TPOT of local turns, as shares of remote. Failed turns count with the
timeout. `infra/planning/live_table.py` measures the same on a cluster.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import WORKLOADS, static
from infra.planning.point import Point, Spec
from infra.planning.runs import Points, Runner, points_of
from streams.core.placement.ppd_table import Bin, PpdCell, PpdTable

LOAD_BINS = 6


def plan(runner: Runner, pools: str, loads: Sequence[float], seed: int) -> PpdTable:
    """Run the workloads on simulated pools, and return their table."""
    specs = [
        Spec(config=static(pools, share), workload=workload, loads_per_s=tuple(loads), seed=seed)
        for share in ("0", "1")
        for workload in WORKLOADS
    ]
    runs = runner.map(f"plan {pools}", points_of, specs)
    points = Points(point for run in runs for point in run)
    return table_of(points, pools, [(w.name, load) for w in WORKLOADS for load in loads])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMeasurement:
    """One kind of turn at one load, measured with all turns remote and with all local."""

    context_tokens: int
    new_tokens: int
    answer_tokens: int
    load: float
    gain_ttft: float
    loss_tpot: float
    samples: int


def table_of(
    points: Points, pools: str, use: Iterable[tuple[str, float]], *, plain: bool = False
) -> PpdTable:
    """Return the table of some points of one P:D ratio, measured with x=0 and x=1.

    `plain` gives the authors' own table, whose clients see the decode worker only. They force turns
    to be local if no remote one completes; a gain of 1 and no loss does the same.
    """
    by_name = {workload.name: workload.profile for workload in WORKLOADS}
    measurements = []
    for name, load in use:
        profile = by_name[name]
        remote, local = (points[static(pools, x, plain=plain), name, load] for x in ("0", "1"))
        gain_ttft, loss_tpot = (_plain_change if plain else _change)(remote, local)
        measurements.append(
            TurnMeasurement(
                context_tokens=profile.first.input_tokens + profile.first.output_tokens,
                new_tokens=profile.later.input_tokens,
                answer_tokens=profile.later.output_tokens,
                load=_load(remote, local),
                gain_ttft=gain_ttft,
                loss_tpot=loss_tpot,
                samples=remote.later + local.later,
            )
        )
    return table_from(measurements)


def _change(remote: Point, local: Point) -> tuple[float, float]:
    """Return the share gained in TTFT and the share lost in TPOT, relative to remote."""
    return 1 - local.cost_ttft / remote.cost_ttft, local.cost_tpot / remote.cost_tpot - 1


def _plain_change(remote: Point, local: Point) -> tuple[float, float]:
    if not remote.later or not local.later:
        return (-1.0 if remote.later else 1.0), 0.0
    loss_tpot = local.every_decode_tpot / remote.every_decode_tpot - 1
    return 1 - local.decode_ttft / remote.decode_ttft, loss_tpot


def table_from(measurements: Sequence[TurnMeasurement], load_bins: int = LOAD_BINS) -> PpdTable:
    """Return a table with edges between the measured lengths, and at quantiles of the loads.

    If each kind was measured at the same n loads, n bins have their edges between these loads.
    """
    edges = {
        "context_tokens": _between(row.context_tokens for row in measurements),
        "new_tokens": _between(row.new_tokens for row in measurements),
        "answer_tokens": _between(row.answer_tokens for row in measurements),
        "load": _quantiles([row.load for row in measurements], load_bins),
    }
    empty = PpdTable(edges, [])
    bins: dict[Bin, list[TurnMeasurement]] = defaultdict(list)
    for row in measurements:
        at = empty.bin_of(row.context_tokens, row.new_tokens, row.answer_tokens, row.load)
        bins[at].append(row)
    return PpdTable(edges, [_cell(at, cell_measurements) for at, cell_measurements in bins.items()])


def _cell(at: Bin, measurements: Sequence[TurnMeasurement]) -> PpdCell:
    return PpdCell(
        bin=at,
        gain_ttft=float(np.mean([row.gain_ttft for row in measurements])),
        loss_tpot=float(np.mean([row.loss_tpot for row in measurements])),
        samples=sum(row.samples for row in measurements),
    )


def _load(remote: Point, local: Point) -> float:
    return (remote.load_seen + local.load_seen) / 2


def _between(values: Iterable[int]) -> list[float]:
    """Return edges halfway between the values, on a logarithmic scale."""
    levels = sorted(set(values))
    return [float(np.sqrt(a * b)) for a, b in zip(levels, levels[1:], strict=False)]


def _quantiles(values: list[float], bins: int) -> list[float]:
    shares = np.arange(1, bins) / bins
    return sorted({round(float(edge), 6) for edge in np.quantile(values, shares)})


def halves(seed: int, points: Points) -> tuple[list[tuple[str, float]], ...]:
    """Split all pairs of workload and load into two halves by a seed: to plan and to test."""
    pairs = [(workload.name, load) for workload in points.workloads for load in points.loads]
    order = np.random.default_rng(seed).permutation(len(pairs))
    middle = len(pairs) // 2
    return [pairs[i] for i in order[:middle]], [pairs[i] for i in order[middle:]]
