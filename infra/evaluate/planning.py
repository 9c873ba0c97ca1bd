"""PPD's table from measured points: algorithm 1, phase 1.

Each workload and load is run with every later turn remote and with every one local; a cell holds
what local gained in TTFT and cost in TPOT, as shares of remote. Failed turns count with the
timeout.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from infra.evaluate.grid import WORKLOADS, static
from infra.evaluate.point import Point, Spec
from infra.evaluate.runs import Runner, points_of
from infra.evaluate.tables import Points
from streams.core.table import Bin, Cell, Table

LOAD_BINS = 6


def plan(runner: Runner, pools: str, loads: Sequence[float], seed: int) -> Table:
    """Run the workloads on simulated pools, and make the table of them."""
    specs = [
        Spec(config=static(pools, share), workload=workload, loads_per_s=tuple(loads), seed=seed)
        for share in ("0", "1")
        for workload in WORKLOADS
    ]
    found = runner.map(f"plan {pools}", points_of, specs)
    points = Points(point for each in found for point in each)
    return table_of(points, pools, [(w.name, load) for w in WORKLOADS for load in loads])


def table_of(points: Points, pools: str, use: Iterable[tuple[str, float]]) -> Table:
    """The table of some of the points of one P:D ratio, measured with x=0 and x=1."""
    by_name = {workload.name: workload for workload in WORKLOADS}
    pairs = [
        (
            by_name[name],
            points[static(pools, "0"), name, load],
            points[static(pools, "1"), name, load],
        )
        for name, load in use
    ]
    profiles = [workload.profile for workload, _, _ in pairs]
    edges = {
        "context_tokens": _between(p.first.input_tokens + p.first.output_tokens for p in profiles),
        "new_tokens": _between(p.later.input_tokens for p in profiles),
        "answer_tokens": _between(p.later.output_tokens for p in profiles),
        "load": _quantiles([_load(remote, local) for _, remote, local in pairs]),
    }
    empty = Table(edges, [])
    bins: dict[Bin, list[tuple[Point, Point]]] = defaultdict(list)
    for workload, remote, local in pairs:
        first, later = workload.profile.first, workload.profile.later
        context_tokens = first.input_tokens + first.output_tokens
        at = empty.bin_of(
            context_tokens, later.input_tokens, later.output_tokens, _load(remote, local)
        )
        bins[at].append((remote, local))
    return Table(edges, [_cell(at, both) for at, both in bins.items()])


def _cell(at: Bin, both: list[tuple[Point, Point]]) -> Cell:
    return Cell(
        bin=at,
        gain_ttft=float(np.mean([1 - b.cost_ttft / a.cost_ttft for a, b in both])),
        loss_tpot=float(np.mean([b.cost_tpot / a.cost_tpot - 1 for a, b in both])),
        samples=sum(a.later + b.later for a, b in both),
    )


def _load(remote: Point, local: Point) -> float:
    return (remote.load_seen + local.load_seen) / 2


def _between(values: Iterable[int]) -> list[float]:
    """Edges halfway, on a logarithmic scale, between the values that occur."""
    known = sorted(set(values))
    return [float(np.sqrt(a * b)) for a, b in zip(known, known[1:], strict=False)]


def _quantiles(values: list[float]) -> list[float]:
    shares = np.arange(1, LOAD_BINS) / LOAD_BINS
    return sorted({round(float(edge), 6) for edge in np.quantile(values, shares)})


def halves(seed: int, points: Points) -> tuple[list[tuple[str, float]], ...]:
    """All pairs of workload and load, cut into two halves by a seed: to plan with, to test with."""
    pairs = [(workload.name, load) for workload in points.workloads for load in points.loads]
    order = np.random.default_rng(seed).permutation(len(pairs))
    middle = len(pairs) // 2
    return [pairs[i] for i in order[:middle]], [pairs[i] for i in order[middle:]]
