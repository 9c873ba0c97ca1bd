"""The paper's tables, computed from the grid's points. Pure arithmetic."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infra.planning.grid import (
    CONFIGS,
    LEVELS,
    RATIOS,
    Config,
    static,
)
from infra.planning.point import Point
from infra.planning.runs import Points
from infra.research.paper import ppd_paper

SLOW_MS = 1_000.0
NEAR = 0.01  # a smaller lead is due to chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Table1Cell:
    """One cell of table 1, over all workloads: changes in percent, and `why` if it is off.

    A cell is the median over points: a change cannot fall below -100 % but has no upper bound, so
    the mean would be that of a few large changes.
    """

    pools: str
    level: str
    paper: float
    ours: float  # median, measured as behind the paper's proxy, from plain disaggregation
    mean: float
    long: float  # median over workloads with long contexts
    trivium: float  # median, measured at Trivium's clients, from Trivium's x=0
    why: str

    @property
    def is_close(self) -> bool:
        return abs(self.ours - self.paper) <= ppd_paper.TABLE_1_POINTS


def changes(old: list[Point], new: list[Point], figure: Callable[[Point], float]) -> list[float]:
    """Return the change in percent for each pair of points that both completed later turns."""
    both = [(a, b) for a, b in zip(old, new, strict=True) if a.later and b.later]
    return [100 * (figure(b) / figure(a) - 1) for a, b in both]


def median(values: list[float]) -> float:
    """Return the median of at least one value."""
    return float(np.median(values))


def change_by_level(
    points: Points,
    old: Config,
    new: Config,
    figure: Callable[[Point], float],
    loads: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return medians of the changes in percent by level of load, of some loads or all.

    Levels without a pair are left out.
    """
    medians = {}
    for level, at_level in LEVELS.items():
        level_loads = [load for load in at_level if loads is None or load in loads]
        if percents := changes(
            points.select(old, level_loads), points.select(new, level_loads), figure
        ):
            medians[level] = median(percents)
    return medians


def table_1(points: Points) -> list[Table1Cell]:
    """Return table 1: later-turn TTFT from x=0 to x=1."""
    cells = []
    for pools in RATIOS:
        for level, loads in LEVELS.items():
            plain = points.select(static(pools, "0", plain=True), loads)
            full = points.select(static(pools, "1", plain=True), loads)
            published = ppd_paper.TABLE_1[pools][level]
            percents = changes(plain, full, lambda p: p.decode_ttft)
            if not percents:
                continue
            ours = median(percents)
            off = abs(ours - published) > ppd_paper.TABLE_1_POINTS
            cells.append(
                Table1Cell(
                    pools=pools,
                    level=level,
                    paper=published,
                    ours=ours,
                    mean=float(np.mean(percents)),
                    long=median(_long(points, pools, loads)),
                    trivium=median(_at_clients(points, pools, loads)),
                    why=_why(plain, full, published) if off else "",
                )
            )
    return cells


def _long(points: Points, pools: str, loads: Iterable[float]) -> list[float]:
    """Return the changes from x=0 to x=1 with long contexts; [0.0] if there are none."""
    old, new = (
        points.select(static(pools, share, plain=True), loads, ppd_paper.LONG_CONTEXT)
        for share in "01"
    )
    return changes(old, new, lambda p: p.decode_ttft) or [0.0]


def _at_clients(points: Points, pools: str, loads: Iterable[float]) -> list[float]:
    """Return the same changes for all workloads, as our clients see them."""
    old, new = (points.select(static(pools, share), loads) for share in "01")
    return changes(old, new, lambda p: p.ttft)


def _why(plain: list[Point], full: list[Point], published: float) -> str:
    """Explain where the model spends its time, for a cell that is off."""
    both = [(a, b) for a, b in zip(plain, full, strict=True) if a.later and b.later]
    to_first = float(np.median([a.ttft for a, _ in both]))
    hand_over = float(np.median([a.decode_ttft - a.ttft for a, _ in both]))
    append = float(np.median([b.decode_ttft for _, b in both]))
    needed = append / (1 + published / 100)
    return (
        f"medians: x=0 takes {to_first:.0f} ms to the prefill worker's token and "
        f"{hand_over:.0f} ms for the hand-over, {to_first + hand_over:.0f} in all, x=1 "
        f"{append:.0f} ms; the published {published:.0f} % would need {needed:.0f} ms at x=0, or "
        f"{(to_first + hand_over) * (1 + published / 100):.0f} ms at x=1"
    )


def trends(cells: list[Table1Cell]) -> dict[str, bool]:
    """Check the statements that table 1 supports against our cells."""
    ours = {(cell.pools, cell.level): cell.ours for cell in cells}
    levels = list(LEVELS)
    checks = {"x=1 is faster in every cell": all(value < 0 for value in ours.values())}
    for pools in RATIOS:
        row = [ours[pools, level] for level in levels if (pools, level) in ours]
        published = [ppd_paper.TABLE_1[pools][level] for level in levels if (pools, level) in ours]
        if len(row) < 2:
            continue
        grows = published[-1] < published[0]
        words = "grows" if grows else "shrinks"
        checks[f"{pools}: the gain {words} with load"] = (row[-1] < row[0]) == grows
    for level in levels:
        column = [ours[pools, level] for pools in RATIOS if (pools, level) in ours]
        if column:
            checks[f"{level} load: more prefill workers, less gain"] = column == sorted(column)
    return checks


# The figure of each objective; smaller is better.
OBJECTIVES: dict[str, Callable[[Point], float]] = {
    "TTFT": lambda p: p.decode_ttft,
    "TPOT": lambda p: p.every_decode_tpot,
    "throughput": lambda p: -p.tokens_per_s,
}
KINDS = ("replica", "x=0", "0<x<1", "x=1", "hybrid")
Winners = dict[tuple[str, float], Config]  # by workload and load


@dataclass(frozen=True, slots=True, kw_only=True)
class Wins:
    """A row of table 2: shares of points won, by kind of configuration and by load level."""

    objective: str
    kinds: dict[str, float]
    best: dict[str, list[tuple[str, float]]]  # by level: the three configurations that win most


def winners(points: Points, figure: Callable[[Point], float]) -> Winners:
    """Return the best configuration of each point, among those that complete nearly all requests
    there."""
    best: Winners = {}
    for workload in points.workloads:
        for load in points.loads:
            rivals = [points[config, workload.name, load] for config in CONFIGS]
            able = [p for p in rivals if p.failure_rate <= 1 - ppd_paper.SUCCESS_MIN and p.later]
            if able:
                best[workload.name, load] = min(able, key=figure).config
    return best


def table_2(points: Points) -> list[Wins]:
    """Return the shares of points that each kind wins, for each objective."""
    rows = []
    for objective, figure in OBJECTIVES.items():
        won = winners(points, figure)
        kinds = Counter(config.kind for config in won.values())
        best = {}
        for level, loads in LEVELS.items():
            names = Counter(config.name for (_, load), config in won.items() if load in loads)
            if names:
                total = sum(names.values())
                best[level] = [(name, count / total) for name, count in names.most_common(3)]
        shares = {kind: kinds[kind] / len(won) for kind in KINDS}
        rows.append(Wins(objective=objective, kinds=shares, best=best))
    return rows


def unlike_winners(points: Points) -> float:
    """Return the share of points at which TTFT and TPOT have different winners."""
    ttft, tpot = (winners(points, OBJECTIVES[name]) for name in ("TTFT", "TPOT"))
    return sum(ttft[at] != tpot[at] for at in ttft) / len(ttft)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputLead:
    """By what share the winners of throughput lead the best x=1, at one level of load."""

    level: str
    median: float
    near_share: float  # of points with a lead below `near`
    near: float = NEAR


def throughput_leads(points: Points) -> list[ThroughputLead]:
    """Return the winners' leads over the best x=1, by level of load."""
    full = [config for config in CONFIGS if config.kind == "x=1"]
    rows, won = [], winners(points, OBJECTIVES["throughput"])
    for level, loads in LEVELS.items():
        leads = [
            points[config, name, load].tokens_per_s
            / max(points[rival, name, load].tokens_per_s for rival in full)
            - 1
            for (name, load), config in won.items()
            if load in loads
        ]
        if leads:
            near_share = float(np.mean([lead < NEAR for lead in leads]))
            rows.append(ThroughputLead(level=level, median=median(leads), near_share=near_share))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """A row of table 4: percent of failed requests by level, and of workloads with any by load.

    It also has possible causes: the most KV in a worker's memory (a share) and in a connector's
    buffer, workers that died of the latter, and the longest request.
    """

    config: str
    percent: dict[str, float]
    workloads: dict[float, float]
    memory_share: float
    buffered_bytes: int
    crashed_points: int
    longest_ms: float
    degraded_loads: int  # at which any workload had failures
    slow_loads: int  # at which any workload's later-turn TTFT p99 was above `SLOW_MS`
    loads: int


def table_4(points: Points, configs: Iterable[Config]) -> list[Failures]:
    """Return the failure rates of each configuration."""
    rows = []
    for config in configs:
        percent, config_points = {}, points.select(config)
        for level, loads in LEVELS.items():
            at = points.select(config, loads)
            if at:
                percent[level] = 100 * sum(p.failed for p in at) / sum(p.requests for p in at)
        at_load = [points.select(config, [load]) for load in points.loads]
        rows.append(
            Failures(
                config=config.name,
                percent=percent,
                workloads={
                    load: 100 * sum(p.failed > 0 for p in at) / len(at)
                    for load, at in zip(points.loads, at_load, strict=True)
                },
                memory_share=max(p.memory_share for p in config_points),
                buffered_bytes=max(p.buffered_bytes for p in config_points),
                crashed_points=sum(p.crashed > 0 for p in config_points),
                longest_ms=max(p.longest_ms for p in config_points),
                degraded_loads=sum(any(p.failed for p in at) for at in at_load),
                slow_loads=sum(any(p.ttft_p99 > SLOW_MS for p in at) for at in at_load),
                loads=len(points.loads),
            )
        )
    return rows


def trends_2(rows: list[Wins]) -> dict[str, bool]:
    """Check which kind wins most points, as table 2 states it."""
    checks = {}
    for row in rows:
        published = ppd_paper.TABLE_2[row.objective]
        first = max(published, key=lambda kind: published[kind])
        ours = max(row.kinds, key=lambda kind: row.kinds[kind])
        checks[f"{row.objective}: {first} wins most points"] = ours == first
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The paper's summary, for one P:D ratio: changes in percent from plain x=0 to x=1.

    Medians over points; volumes are sums over all points.
    """

    pools: str
    ttft: float
    kv_volume: float
    later_kv_volume: float
    tpot_prefill_heavy: float


def headline(points: Points) -> list[Headline]:
    """Return the paper's summary, a row for each P:D ratio."""
    rows = []
    heavy = {w.name for w in points.workloads if w.kind == "prefill-heavy"}
    for pools in RATIOS:
        plain = points.select(static(pools, "0", plain=True))
        full = points.select(static(pools, "1", plain=True))
        rows.append(
            Headline(
                pools=pools,
                ttft=median(changes(plain, full, lambda p: p.decode_ttft)),
                kv_volume=_total(plain, full, lambda p: p.kv_bytes),
                later_kv_volume=_total(plain, full, lambda p: p.later_kv_bytes),
                tpot_prefill_heavy=median(
                    changes(
                        [p for p in plain if p.workload in heavy],
                        [p for p in full if p.workload in heavy],
                        lambda p: p.decode_tpot,
                    )
                ),
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTurns:
    """Turn-1 TTFT of one configuration by level of load: medians over points, ms."""

    config: str
    ttft: dict[str, float]  # as its clients see it; plain: from the decode worker


def first_turns(points: Points) -> list[FirstTurns]:
    """Return turn-1 TTFT of replicas, and of plain x=0 and x=1, x=0, x=1 and `learned` of each
    ratio."""
    chosen = [Config(pools="4R", policy="replica", plain=True)]
    for pools in RATIOS:
        chosen += [static(pools, share, plain=True) for share in "01"]
        chosen += [*(static(pools, share) for share in "01"), Config(pools=pools, policy="learned")]
    rows = []
    for config in chosen:
        ttft = {}
        for level, loads in LEVELS.items():
            config_points = [point for point in points.select(config, loads) if point.later]
            if config_points:
                ttft[level] = median(
                    [
                        point.first_decode_ttft if config.plain else point.first_ttft
                        for point in config_points
                    ]
                )
        rows.append(FirstTurns(config=config.name, ttft=ttft))
    return rows


def _total(old: list[Point], new: list[Point], figure: Callable[[Point], float]) -> float:
    before = sum(figure(p) for p in old)
    return 100 * (sum(figure(p) for p in new) / before - 1) if before else 0.0
