"""Figures that clients care about, from outcomes of a log or of a simulation."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

from infra.bench.results import number, percentile
from schemas.records import Mode, Outcome, OutcomeKind

PERCENTS = (50, 90, 99)
METRICS: Mapping[str, Callable[[Outcome], float]] = {
    "ttft_ms": lambda outcome: float(outcome.first_token_ms - outcome.arrived_ms),
    "tpot_ms": lambda outcome: (
        (outcome.ended_ms - outcome.first_token_ms) / max(1, outcome.completion_tokens - 1)
    ),
    "e2e_ms": lambda outcome: float(outcome.ended_ms - outcome.arrived_ms),
}


def figures(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return percentiles of completed answers, the share placed locally, and the KV bytes moved."""
    rows = list(outcomes)
    answers = [
        outcome
        for outcome in rows
        if outcome.kind is OutcomeKind.COMPLETED and outcome.first_token_ms
    ]
    summary: dict[str, Any] = {
        "answers": len(answers),
        "failed": len(rows) - len(answers),
        "local_share": sum(outcome.mode is Mode.LOCAL for outcome in answers)
        / max(1, len(answers)),
        "kv_bytes": sum(outcome.kv_bytes for outcome in answers),
    }
    for name, measure in METRICS.items():
        values = [measure(outcome) for outcome in answers]
        summary[name] = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
    return summary


def errors(predicted: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return predicted / live - 1, per metric and percentile."""
    by_metric: dict[str, dict[str, float]] = {}
    for name in METRICS:
        by_metric[name] = {
            percent: predicted[name][percent] / value - 1
            for percent, value in live[name].items()
            if value and predicted[name][percent] is not None
        }
    return by_metric


def table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row of figures for each name."""
    heads = [
        f"{name.removesuffix('_ms').upper()} p{percent}" for name in METRICS for percent in PERCENTS
    ]
    rich_table = Table("", "answers", "local", "KV, MB", *heads, box=None, title=title)
    for name, row in rows.items():
        cells = [row[metric][f"p{percent}"] for metric in METRICS for percent in PERCENTS]
        rich_table.add_row(
            name,
            str(row["answers"]),
            f"{row['local_share']:.0%}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            *map(number, cells),
        )
    return rich_table
