"""What clients would care about, from outcomes; the same for those of a log and of a simulation."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

from infra.bench.results import number, percentile
from schemas.records import Mode, Outcome, OutcomeKind

PERCENTS = (50, 90, 99)
METRICS: Mapping[str, Callable[[Outcome], float]] = {
    "ttft_ms": lambda each: float(each.first_token_ms - each.arrived_ms),
    "tpot_ms": lambda each: (
        (each.ended_ms - each.first_token_ms) / max(1, each.completion_tokens - 1)
    ),
    "e2e_ms": lambda each: float(each.ended_ms - each.arrived_ms),
}


def figures(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Percentiles of whole answers, how many were placed locally, and the KV bytes that moved."""
    ended = list(outcomes)
    whole = [each for each in ended if each.kind is OutcomeKind.COMPLETED and each.first_token_ms]
    found: dict[str, Any] = {
        "answers": len(whole),
        "failed": len(ended) - len(whole),
        "local_share": sum(each.mode is Mode.LOCAL for each in whole) / max(1, len(whole)),
        "kv_bytes": sum(each.kv_bytes for each in whole),
    }
    for name, measure in METRICS.items():
        values = [measure(each) for each in whole]
        found[name] = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
    return found


def errors(predicted: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Predicted over live, less one, per metric and percentile."""
    found: dict[str, dict[str, float]] = {}
    for name in METRICS:
        found[name] = {
            percent: predicted[name][percent] / value - 1
            for percent, value in live[name].items()
            if value and predicted[name][percent] is not None
        }
    return found


def table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row of figures for each name."""
    heads = [
        f"{name.removesuffix('_ms').upper()} p{percent}" for name in METRICS for percent in PERCENTS
    ]
    found = Table("", "answers", "local", "KV, MB", *heads, box=None, title=title)
    for name, row in rows.items():
        cells = [row[metric][f"p{percent}"] for metric in METRICS for percent in PERCENTS]
        found.add_row(
            name,
            str(row["answers"]),
            f"{row['local_share']:.0%}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            *map(number, cells),
        )
    return found
