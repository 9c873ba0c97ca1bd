"""The report's pictures: each function draws one figure of the results."""

from collections.abc import Callable
from itertools import product
from typing import Any

from infra.planning.grid import LEVELS, RATIOS, SHARES, Config, static
from infra.planning.runs import Points
from infra.research.paper import ppd_paper
from infra.research.report.findings import EvaluationFindings
from infra.research.report.pages import COLOURS, draw_bars, draw_png, mark, panels
from infra.research.studies.regret import cost

_PAPER, _OURS = COLOURS[:2]


def pictures(results: EvaluationFindings) -> dict[str, bytes]:
    """Draw every picture; return PNG files by name, without suffix."""
    return {name: draw_png(draw, results, tall=name in _TALL) for name, draw in _DRAW.items()}


def _table_1(figure: Any, results: EvaluationFindings) -> None:
    for pools, axes in panels(figure, RATIOS):
        cells = [cell for cell in results.table_1 if cell.pools == pools]
        values = {"paper": [c.paper for c in cells], "here": [c.ours for c in cells]}
        draw_bars(axes, [cell.level for cell in cells], values, "turn-2 TTFT, x=0 to x=1, %")


def _interference(figure: Any, results: EvaluationFindings) -> None:
    rows, published = results.interference, {1: ppd_paper.FIGURE_2, 4: ppd_paper.FIGURE_6}
    (_, short), (_, appends), (_, long) = panels(figure, ["figures 2 and 6", "", "figure 7"])
    values = {
        "paper": [published[row.prompts].get(row.kind, 0.0) for row in rows],
        "here, steps": [row.steps for row in rows],
        "here, answers": [row.answers for row in rows],
    }
    names = [f"{row.prompts} {row.kind}" for row in rows]
    draw_bars(short, names, values, f"slower decode at batch {ppd_paper.FIGURE_2_BATCH}, %", 70)
    appends.plot(*zip(*results.appends, strict=True), marker="o", color=_OURS)
    mark(appends, "appended tokens beside the batch", log="x")
    for kind, colour in (("full", _PAPER), ("append", _OURS)):
        marks = [(row.context_tokens, row.steps) for row in results.contexts if row.kind == kind]
        long.plot(*zip(*marks, strict=True), marker="o", color=colour, label=kind)
    mark(long, f"context of a batch of {ppd_paper.FIGURE_7_BATCH}", log="x", legend=True)


def _chats(figure: Any, results: EvaluationFindings) -> None:
    """Draw average query latency by load, without loads at which a request failed."""
    pairs = list(product(dict.fromkeys(row.about for row in results.chats), RATIOS))
    titles = [f"{source}, {pools}" for source, pools in pairs]
    for (source, pools), (_, axes) in zip(pairs, panels(figure, titles), strict=True):
        latencies: dict[str, list[tuple[float, float]]] = {}
        for row in results.chats:
            if row.about == source and row.config.startswith(pools) and not row.failed:
                served = latencies.setdefault(row.config.partition(" ")[2], [])
                served.append((row.load_per_s, row.latency / 1e3))
        for name, marks in latencies.items():
            axes.plot(*zip(*marks, strict=True), marker=".", label=name)
        mark(axes, y="average query latency, s", legend=True)


def _fronts(figure: Any, results: EvaluationFindings) -> None:
    """Draw figure 8: a panel for each kind of workload and load."""
    rows = [row for row in results.places if row.figure == "8"]
    for among, axes in panels(figure, list(dict.fromkeys(row.among for row in rows))):
        for row in rows:
            if row.among == among and not row.failed:
                colour = _OURS if row.is_local else "black" if "table" in row.config else _PAPER
                marker = "o" if row.at_front else "x"
                axes.plot(row.tokens_per_s, row.ttft_p99, marker, color=colour)
        mark(axes, y="TTFT p99, ms", log="y")


def _frontier(figure: Any, results: EvaluationFindings) -> None:
    axes = figure.add_subplot()
    for prefix, colour in (("x=", _PAPER), ("learned", _OURS)):
        marks = [row for row in results.frontier if row.name.startswith(prefix)]
        axes.plot([m.tpot for m in marks], [m.ttft for m in marks], marker="o", color=colour)
        for row in marks:
            axes.annotate(row.name, (row.tpot, row.ttft), fontsize=7)
    mark(axes, "TPOT over that of x=0", "TTFT over that of x=0")


def _turns(figure: Any, results: EvaluationFindings) -> None:
    longest = max(row.turns for row in results.lengths)
    for pools, axes in panels(figure, RATIOS):
        for row in results.lengths:
            if row.turns == longest and row.config.startswith(pools):
                turns = range(2, len(row.decode_ttft_by_turn) + 2)
                axes.plot(turns, row.decode_ttft_by_turn, label=row.config.partition(" ")[2])
        axes.set_ylim(bottom=0)
        mark(axes, "turn", "TTFT of the decode worker, ms", legend=True)


def _loads(figure: Any, results: EvaluationFindings) -> None:
    """Draw the cost by load for every fixed share and `learned`."""
    points = Points(results.points)
    for pools, axes in panels(figure, RATIOS):
        learned = Config(pools=pools, policy="learned")
        for config in (*(static(pools, share) for share in SHARES), learned):
            costs = []
            for load in points.loads:
                reference = points.select(static(pools, "0"), [load])
                pairs = list(zip(points.select(config, [load]), reference, strict=True))
                costs.append(sum(cost(a, b) for a, b in pairs) / len(pairs))
            name, width = config.name.partition(" ")[2], 2.5 if config == learned else 1.0
            axes.plot(points.loads, costs, label=name, linewidth=width)
        mark(axes, "conversations/s", "mean cost J (x=0 is 1)", "y", legend=True)


def _failures(figure: Any, results: EvaluationFindings) -> None:
    axes = figure.add_subplot()
    rows = [row for row in results.table_4 if any(row.percent.values())]
    values = {level: [row.percent.get(level, 0.0) for row in rows] for level in LEVELS}
    draw_bars(axes, [row.config for row in rows], values, "failed requests, %", 70)
    if not rows:
        axes.text(0.5, 0.5, "no request failed", ha="center", transform=axes.transAxes)


_DRAW: dict[str, Callable[[Any, EvaluationFindings], None]] = {
    "table-1": _table_1,
    "figures-2-6-7": _interference,
    "figure-4": _chats,
    "figure-8": _fronts,
    "frontier": _frontier,
    "turns": _turns,
    "cost-by-load": _loads,
    "table-4": _failures,
}
_TALL = ("figure-4", "figure-8")
