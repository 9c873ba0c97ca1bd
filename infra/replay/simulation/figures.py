"""Computes what clients care about, from outcomes on the log or of a simulation."""

from collections import Counter
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
    """Return percentiles of completed answers, where they ran, and the KV bytes that moved."""
    rows = list(outcomes)
    answers = [
        outcome
        for outcome in rows
        if outcome.kind is OutcomeKind.COMPLETED and outcome.first_token_ms
    ]
    summary: dict[str, Any] = {
        "answers": len(answers),
        "failed": len(rows) - len(answers),
        "placed_again": sum(outcome.attempt > 1 for outcome in rows),
        "modes": dict(sorted(Counter(outcome.mode.value for outcome in answers).items())),
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


_COUNTS = {"failed": "failed", "placed_again": "placed again", "unserved": "not sent"}


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row of figures for each name; counts that are all 0 have no column."""
    counts = [name for name in _COUNTS if any(row.get(name) for row in rows.values())]
    heads = [
        f"{name.removesuffix('_ms').upper()} p{percent}" for name in METRICS for percent in PERCENTS
    ]
    columns = ("", "answers", *(_COUNTS[name] for name in counts), "local", "KV, MB", *heads)
    rich_table = Table(*columns, box=None, title="times in ms")
    for name, row in rows.items():
        cells = [row[metric][f"p{percent}"] for metric in METRICS for percent in PERCENTS]
        rich_table.add_row(
            name,
            str(row["answers"]),
            *(str(row.get(count, "-")) for count in counts),
            f"{row['local_share']:.0%}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            *map(number, cells),
        )
    return rich_table
