"""Writes the findings of `trivium evaluate ppd` as JSON, PNG files and one page (`ppd.jinja`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.planning import authors_serving
from infra.planning.grid import CONVERSATIONS_MAX
from infra.planning.point import ORDERS
from infra.research.paper import conversations, ppd_paper
from infra.research.paper.paper_tables import KINDS
from infra.research.report import plots
from infra.research.report.findings import EvaluationFindings
from infra.research.report.pages import render
from infra.research.studies import (
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
from infra.research.studies.interference import SlowDown
from infra.research.studies.pareto import ParetoPoint
from infra.research.studies.served import ServedRow
from infra.research.studies.weights import WeightResult
from infra.simulator.machine.latency import LLAMA_8B

_STUDIES = (failures, interference, orders, pareto, regret, sensitivity, step_change, thresholds)
_TURN_TOKENS = 2 * conversations.ASKED_TOKENS + conversations.ANSWERED_TOKENS


def write(results: EvaluationFindings, folder: Path) -> Path:
    """Write all files into the folder and return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(to_json(results))
    pictures = plots.pictures(results)
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    path = folder / "report.html"
    path.write_text(render("ppd.jinja", pictures, **_context(results)))
    return path


def to_json(results: EvaluationFindings, *, points: bool = True) -> str:
    """Return the results as JSON, with or without the points."""
    tree = asdict(results)
    if not points:
        del tree["points"]
    return json.dumps(tree, indent=1)


def _context(results: EvaluationFindings) -> dict[str, Any]:
    """Return what the page's template shows, and its functions of rows."""
    loads = next(iter(ppd_paper.TABLE_4.values()))
    return {
        "results": results,
        "paper": ppd_paper,
        "serving": authors_serving,
        **{study.__name__.rpartition(".")[2]: study for study in _STUDIES},
        "orders_of_vllm": ", ".join(ORDERS),
        "buffer_gb": f"{authors_serving.RECEIVE_BUFFER_BYTES / 1e9:.0f}",
        "connections": CONVERSATIONS_MAX,
        "second_turns_bytes": CONVERSATIONS_MAX * _TURN_TOKENS * LLAMA_8B.kv_bytes_per_token,
        "kinds": KINDS,
        "headline": _headline(results),
        "table_2": _table_2(results),
        "winners": [
            (row.objective, level, ", ".join(f"{name} {share:.0%}" for name, share in names))
            for row in results.table_2
            for level, names in row.best.items()
        ],
        "table_4_heads": ("", *(f"{load:g}/s" for load in loads)),
        "table_4": _table_4(results),
        "model_pools": many_turns.MODEL_POOLS,
        "by_load": _by_load,
        "change_from_x0": _change_from_x0,
        "fronts": fronts,
        "published_failures": _published_failures,
        "published_local": lambda row: f"{ppd_paper.FIGURE_5_LOCAL.get(row.w_tpot, 0)} %",
        "published_slow_down": _published_slow_down,
        "published_slow_down_by_context": _published_slow_down_by_context,
        "weight_of": _weight_of,
    }


def _headline(results: EvaluationFindings) -> list[tuple[str, ...]]:
    low, high = ppd_paper.TPOT_PREFILL_HEAVY
    mean, best, worst = ppd_paper.TTFT_LATER
    ttft = f"{mean:.0f} ({best:.0f} to {worst:.0f})"
    rows = [
        (
            *(h.pools, f"{h.ttft:.1f}", f"{h.kv_volume:.1f}", f"{h.later_kv_volume:.1f}"),
            f"{h.tpot_prefill_heavy:+.1f}",
        )
        for h in results.headline
    ]
    return [*rows, ("paper", ttft, f"{ppd_paper.KV_VOLUME:.0f}", "", f"+{low:.0f} to +{high:.0f}")]


def _table_2(results: EvaluationFindings) -> list[tuple[str, ...]]:
    """Return the shares of points that each kind wins, and their means, as published and here."""
    published = {**ppd_paper.TABLE_2, "average": ppd_paper.TABLE_2_AVERAGE}
    ours = {row.objective: row.kinds for row in results.table_2}
    ours["average"] = {k: sum(row[k] for row in ours.values()) / len(ours) for k in KINDS}
    rows: list[tuple[str, ...]] = []
    for name, shares in ours.items():
        rows.append((f"{name}, paper", *(f"{published[name].get(kind, '')}" for kind in KINDS)))
        rows.append((f"{name}, here", *(f"{100 * shares[kind]:.1f}" for kind in KINDS)))
    return rows


def _table_4(results: EvaluationFindings) -> list[tuple[Any, ...]]:
    """Return the percent of workloads in which a request failed, as published and here."""
    ours, rows = {row.config: row.workloads for row in results.table_4}, list[tuple[Any, ...]]()
    for name, published in ppd_paper.TABLE_4.items():
        percents = ours[name if name == "4R" else f"{name} plain"]
        here = [f"{percents[load]:.0f}" if load in percents else "" for load in published]
        rows += [(f"{name}, paper", *published.values()), (f"{name}, here", *here)]
    return rows


def fronts(rows: Sequence[ParetoPoint]) -> str:
    """Return how often each kind of configuration is at a front, in words."""
    among = len({row.among for row in rows})
    counts = {
        "x=1": (3, sum(row.at_front for row in rows if row.is_local)),
        "dynamic PPD": (3, sum(row.at_front for row in rows if " table" in row.config)),
        "x=0": (3, sum(row.at_front for row in rows if " x=0 " in row.config)),
        "replicas": (1, sum(row.at_front for row in rows if row.config == "4R")),
    }
    shares = (f"{name} {count} of {configs * among}" for name, (configs, count) in counts.items())
    return f"Places at the front: {', '.join(shares)}."


def _by_load(field: str, form: str) -> Callable[[Any], str]:
    """Return a function that shows a field with a figure for each load or level of load."""

    def show(row: Any) -> str:
        figures: Mapping[float | str, Any] = getattr(row, field)
        return ", ".join(
            f"{form % value} at {at if isinstance(at, str) else f'{at:g}/s'}"
            for at, value in figures.items()
        )

    return show


def _change_from_x0(rows: Sequence[ServedRow]) -> Callable[[ServedRow], str]:
    """Return a function that shows the change of TTFT from plain x=0 of the same pools, turns and
    model."""

    def key(row: ServedRow) -> tuple[str, int, str]:
        return row.config.partition(" ")[0], row.turns, row.about

    x0 = {key(row): row.decode_ttft for row in rows if row.config.endswith("x=0 plain")}

    def change(row: ServedRow) -> str:
        base = x0.get(key(row))
        return "" if base is None else f"{100 * (row.decode_ttft / base - 1):+.0f} %"

    return change


def _published_failures(row: ServedRow) -> str:
    pools, _, how = row.config.partition(" ")
    is_published = row.about == conversations.SHAREGPT.name and how == "x=0 plain"
    succeeded = ppd_paper.SHAREGPT_PLAIN.get(pools, {}) if is_published else {}
    return f"{100 - succeeded[row.load_per_s]:.1f}" if row.load_per_s in succeeded else ""


def _published_slow_down(row: SlowDown) -> str:
    published = {1: ppd_paper.FIGURE_2, 4: ppd_paper.FIGURE_6}[row.prompts]
    return f"{published[row.kind]:+.0f}" if row.kind in published else ""


def _published_slow_down_by_context(row: SlowDown) -> str:
    if row.kind == "full" and row.context_tokens in ppd_paper.FIGURE_7_FULL:
        low, high = ppd_paper.FIGURE_7_FULL[row.context_tokens]
        return f"+{low:.0f} to +{high:.0f}"
    if row.kind == "append" and row.context_tokens in ppd_paper.FIGURE_7_APPEND_MAX:
        return f"below +{ppd_paper.FIGURE_7_APPEND_MAX[row.context_tokens]:.0f}"
    return ""


def _weight_of(row: WeightResult) -> str:
    return "" if row.w_tpot == weights.NO_WEIGHT else f"{row.w_tpot:g}"
