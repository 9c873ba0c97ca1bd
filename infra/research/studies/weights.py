"""Weights against TTFT and TPOT: figure 5 in its own set-up, and the frontier on the grid.

Figure 5 has 500 prefill-heavy conversations, 1P3D, at two loads; w_ttft 1 and a rising w_tpot,
compared with plain x=0, which is static. Dynamic PPD is the authors' table behind their proxy;
`learned` is Trivium's. The authors take conversations of ShareGPT and WildChat; here similar ones
are drawn (`infra/research/paper/conversations.py`), and only those with more prompt than answer
tokens are kept.

On the grid, weights move `learned` between TTFT and TPOT. Each mark is the mean over workloads and
loads of one ratio, relative to x=0 at the same point.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import SHARES, WORKLOADS, Config, static
from infra.planning.point import Point, Spec
from infra.planning.runs import Points, Runner, points_of
from infra.research.paper import ppd_paper
from infra.research.paper.conversations import ConversationSource, conversations
from infra.research.studies.chats import chat_spec
from infra.research.studies.served import ServedRow, serve
from streams.core.placement.ppd_table import PpdTable

POOLS = "1P3D"
LOADS_PER_S = (8.0, 16.0)
CONVERSATIONS, QUICK_CONVERSATIONS = 500, 100
NO_WEIGHT = -1.0  # of static configurations
FRONTIER_POOLS = "2P2D"
FRONTIER_WEIGHTS = ((1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightResult:
    """One configuration at one load; changes from plain x=0 in percent."""

    served: ServedRow
    w_tpot: float  # `NO_WEIGHT` for static configurations
    ttft_change: float  # of the decode worker's first token, later turns
    tpot_change: float


def run_weights(
    runner: Runner,
    plain: PpdTable,
    sources: Sequence[ConversationSource],
    seed: int,
    *,
    quick: bool,
) -> list[WeightResult]:
    """Run plain x=0, and each policy with every weight, at both loads."""
    count = QUICK_CONVERSATIONS if quick else CONVERSATIONS
    policies = (
        Config(pools=POOLS, policy="table", plain=True),
        Config(pools=POOLS, policy="learned"),
    )
    chosen = [(static(POOLS, "0", plain=True), NO_WEIGHT)]
    chosen += [(config, w_tpot) for config in policies for w_tpot in ppd_paper.FIGURE_5_LOCAL]
    tasks = [
        (
            chat_spec(config, plain, load, seed, (-1.0, -1.0) if w == NO_WEIGHT else (1.0, w)),
            sources,
            count,
        )
        for load in LOADS_PER_S
        for config, w in chosen
    ]
    rows, results = runner.map("figure 5", _run, tasks), []
    for number, row in enumerate(rows):
        base = rows[number - number % len(chosen)]
        results.append(
            WeightResult(
                served=row,
                w_tpot=chosen[number % len(chosen)][1],
                ttft_change=100 * (row.decode_ttft / base.decode_ttft - 1),
                tpot_change=100 * (row.tpot / base.tpot - 1),
            )
        )
    return results


def _run(task: tuple[Spec, Sequence[ConversationSource], int]) -> ServedRow:
    spec, sources, count = task
    (load,) = spec.loads_per_s
    tokens = spec.setup.block_tokens
    chats = conversations(sources, load, count, tokens, spec.seed, prefill_heavy=True)
    return serve("prefill-heavy", spec, chats, load_per_s=load)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Mean TTFT and TPOT relative to x=0."""

    name: str
    ttft: float
    tpot: float
    local_share: float


def frontier_points(runner: Runner, points: Points, seed: int) -> list[FrontierPoint]:
    """Return the fixed shares, from the grid's points, and `learned` with each pair of weights."""
    loads = tuple(points.loads[1::3])
    reference = points.select(static(FRONTIER_POOLS, "0"), loads)
    frontier = [
        _frontier_point(
            f"x={share}", points.select(static(FRONTIER_POOLS, share), loads), reference
        )
        for share in SHARES
    ]
    learned = Config(pools=FRONTIER_POOLS, policy="learned")
    specs = [
        Spec(config=learned, workload=workload, loads_per_s=loads, seed=seed, weights=weights)
        for weights in FRONTIER_WEIGHTS
        for workload in WORKLOADS
        if workload in points.workloads
    ]
    runs = runner.map("weights", points_of, specs)
    stride = len(points.workloads)
    for i, (w_ttft, w_tpot) in enumerate(FRONTIER_WEIGHTS):
        run_points = [point for run in runs[i * stride : (i + 1) * stride] for point in run]
        frontier.append(_frontier_point(f"learned {w_ttft:g}/{w_tpot:g}", run_points, reference))
    return frontier


def _frontier_point(name: str, points: list[Point], reference: list[Point]) -> FrontierPoint:
    pairs = list(zip(points, reference, strict=True))
    return FrontierPoint(
        name=name,
        ttft=float(np.mean([a.cost_ttft / b.cost_ttft for a, b in pairs])),
        tpot=float(np.mean([a.cost_tpot / b.cost_tpot for a, b in pairs])),
        local_share=sum(a.local for a in points) / max(1, sum(a.later for a in points)),
    )
