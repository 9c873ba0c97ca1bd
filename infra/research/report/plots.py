"""The report's pictures, with matplotlib: each function draws one figure of the results."""

from collections.abc import Callable
from io import BytesIO
from itertools import product
from typing import Any

from infra.planning.grid import LEVELS, RATIOS, SHARES, static
from infra.planning.runs import Points
from infra.research.paper import ppd_paper
from infra.research.report.findings import EvaluationFindings
from schemas.errors import ConfigError

_PAPER, _OURS, _SHORT = "#9aa5b1", "#1f6feb", "#9ecbff"


def pictures(results: EvaluationFindings) -> dict[str, bytes]:
    """Draw every picture; return PNG files by name, without suffix."""
    return {name: draw_png(draw, results, tall=name in _TALL) for name, draw in _DRAW.items()}


def live(figures_by_load: dict[str, dict[str, Any]]) -> bytes:
    """Draw time to first token by variant, for each load that was run live."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        width = 0.8 / len(figures_by_load)
        for number, (name, rows) in enumerate(figures_by_load.items()):
            places = [at + number * width for at in range(len(rows))]
            axes.bar(places, [row["ttft_ms"] for row in rows.values()], width, label=name)
            axes.set_xticks(range(len(rows)), list(rows), rotation=20, fontsize=8)
        axes.set_ylabel("TTFT p50 of later turns, ms")
        axes.legend(fontsize=7)

    return draw_png(draw)


def draw_png(draw: Callable[..., None], *results: EvaluationFindings, tall: bool = False) -> bytes:
    """Draw one figure as a PNG file; `draw` gets the figure and `results`."""
    try:
        import matplotlib
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ConfigError(
            "evaluate: the report's pictures need matplotlib; install the extra `dev`"
        ) from error
    matplotlib.use("Agg")
    figure = pyplot.figure(figsize=(9, 7.2 if tall else 3.6), layout="constrained")
    draw(figure, *results)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _table_1(figure: Any, results: EvaluationFindings) -> None:
    for i, pools in enumerate(RATIOS):
        axes = figure.add_subplot(1, 3, i + 1)
        cells = [cell for cell in results.table_1 if cell.pools == pools]
        places = range(len(cells))
        published, ours = [c.paper for c in cells], [c.ours for c in cells]
        axes.bar([x - 0.2 for x in places], published, 0.4, color=_PAPER, label="paper")
        axes.bar([x + 0.2 for x in places], ours, 0.4, color=_OURS, label="here")
        axes.set_xticks(list(places), [cell.level for cell in cells])
        axes.set_title(pools)
        axes.axhline(0, color="black", linewidth=0.6)
        if not i:
            axes.set_ylabel("turn-2 TTFT, x=0 to x=1, %")
            axes.legend()


def _interference(figure: Any, results: EvaluationFindings) -> None:
    axes = figure.add_subplot(1, 3, 1)
    rows = results.interference
    published = {1: ppd_paper.FIGURE_2, 4: ppd_paper.FIGURE_6}
    paper_slowdowns = [published[row.prompts].get(row.kind, 0.0) for row in rows]
    places = range(len(rows))
    axes.bar([x - 0.27 for x in places], paper_slowdowns, 0.27, color=_PAPER)
    axes.bar(list(places), [row.steps for row in rows], 0.27, color=_OURS)
    axes.bar([x + 0.27 for x in places], [row.answers for row in rows], 0.27, color=_SHORT)
    names = [f"{row.prompts} {row.kind}" for row in rows]
    axes.set_xticks(list(places), names, rotation=70, fontsize=7)
    axes.set_ylabel(f"slower decode at batch {ppd_paper.FIGURE_2_BATCH}, %")
    axes.legend(labels=["paper", "here, steps", "here, answers"], fontsize=7)
    append_axes = figure.add_subplot(1, 3, 2)
    append_axes.plot(*zip(*results.appends, strict=True), marker="o", color=_OURS)
    append_axes.set_xscale("log", base=2)
    append_axes.set_xlabel("appended tokens beside the batch")
    long = figure.add_subplot(1, 3, 3)
    for kind, colour in (("full", _PAPER), ("append", _OURS)):
        context_rows = [row for row in results.contexts if row.kind == kind]
        tokens, steps = (
            [row.context_tokens for row in context_rows],
            [row.steps for row in context_rows],
        )
        long.plot(tokens, steps, marker="o", color=colour, label=kind)
    long.set_xscale("log", base=2)
    long.set_xlabel(f"context of a batch of {ppd_paper.FIGURE_7_BATCH}")
    long.legend(fontsize=7)


def _chats(figure: Any, results: EvaluationFindings) -> None:
    """Draw average query latency by load, without loads at which a request failed."""
    sources = list(dict.fromkeys(row.source for row in results.chats))
    for number, (source, pools) in enumerate(product(sources, RATIOS)):
        axes = figure.add_subplot(len(sources), len(RATIOS), number + 1)
        source_rows = [row for row in results.chats if row.source == source]
        for config in dict.fromkeys(
            row.config for row in source_rows if row.config.startswith(pools)
        ):
            rows = [row for row in source_rows if row.config == config and not row.failed]
            loads, latency = [row.load_per_s for row in rows], [row.latency / 1e3 for row in rows]
            axes.plot(loads, latency, marker=".", label=config.partition(" ")[2])
        axes.set_title(f"{source}, {pools}", fontsize=8)
        if not number:
            axes.set_ylabel("average query latency, s", fontsize=8)
            axes.legend(fontsize=6)


def _fronts(figure: Any, results: EvaluationFindings) -> None:
    """Draw figure 8: a panel for each kind of workload and load."""
    rows = [row for row in results.places if row.figure == "8"]
    panels = list(dict.fromkeys(row.among for row in rows))
    for number, among in enumerate(panels):
        axes = figure.add_subplot(-(-len(panels) // 3), 3, number + 1)
        for row in rows:
            if row.among == among and not row.failed:
                colour = _OURS if row.is_local else "black" if "table" in row.config else _PAPER
                marker = "o" if row.at_front else "x"
                axes.plot(row.tokens_per_s, row.ttft_p99, marker, color=colour)
        axes.set_title(among, fontsize=8)
        axes.set_yscale("log")
        if not number:
            axes.set_ylabel("TTFT p99, ms", fontsize=8)


def _frontier(figure: Any, results: EvaluationFindings) -> None:
    axes = figure.add_subplot()
    for prefix, colour in (("x=", _PAPER), ("learned", _OURS)):
        marks = [mark for mark in results.frontier if mark.name.startswith(prefix)]
        axes.plot([m.tpot for m in marks], [m.ttft for m in marks], marker="o", color=colour)
        for mark in marks:
            axes.annotate(mark.name, (mark.tpot, mark.ttft), fontsize=7)
    axes.set_xlabel("TPOT over that of x=0")
    axes.set_ylabel("TTFT over that of x=0")


def _turns(figure: Any, results: EvaluationFindings) -> None:
    longest = max(row.turns for row in results.lengths)
    for i, pools in enumerate(RATIOS):
        axes = figure.add_subplot(1, 3, i + 1)
        for row in results.lengths:
            if row.turns == longest and row.config.startswith(pools):
                turns = range(2, len(row.decode_ttft_by_turn) + 2)
                axes.plot(turns, row.decode_ttft_by_turn, label=row.config.partition(" ")[2])
        axes.set_title(pools)
        axes.set_xlabel("turn")
        axes.set_ylim(bottom=0)
        if not i:
            axes.set_ylabel("TTFT of the decode worker, ms")
            axes.legend(fontsize=7)


def _loads(figure: Any, results: EvaluationFindings) -> None:
    """Draw the cost by load for every fixed share and `learned`."""
    from infra.planning.grid import Config
    from infra.research.studies.regret import cost

    points = Points(results.points)
    for i, pools in enumerate(RATIOS):
        axes = figure.add_subplot(1, 3, i + 1)
        configs = [static(pools, share) for share in SHARES]
        configs.append(Config(pools=pools, policy="learned"))
        for config in configs:
            costs = []
            for load in points.loads:
                load_points = points.select(config, [load])
                reference = points.select(static(pools, "0"), [load])
                pairs = list(zip(load_points, reference, strict=True))
                costs.append(sum(cost(a, b) for a, b in pairs) / len(pairs))
            learned = config.policy == "learned"
            name = config.name.partition(" ")[2]
            axes.plot(points.loads, costs, label=name, linewidth=2.5 if learned else 1.0)
        axes.set_title(pools)
        axes.set_xlabel("conversations/s")
        axes.set_yscale("log")
        if not i:
            axes.set_ylabel("mean cost J (x=0 is 1)")
            axes.legend(fontsize=7)


def _failures(figure: Any, results: EvaluationFindings) -> None:
    axes = figure.add_subplot()
    rows = [row for row in results.table_4 if any(row.percent.values())]
    for offset, level in enumerate(level for level in LEVELS):
        values = [row.percent.get(level, 0.0) for row in rows]
        axes.bar([x + 0.25 * (offset - 1) for x in range(len(rows))], values, 0.25, label=level)
    axes.set_xticks(range(len(rows)), [row.config for row in rows], rotation=70, fontsize=7)
    axes.set_ylabel("failed requests, %")
    if rows:
        axes.legend()
    else:
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
