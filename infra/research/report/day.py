"""Reports a day and night: a picture of the rate and the workers, and the figures."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra.bench import results
from infra.research.report.pages import draw_png, mark
from infra.research.studies.day_and_night import DayComparison, FleetResult
from infra.simulator.cluster import READY_MS
from schemas.records import Role

COLOURS = {Role.PREFILL: "#1f6feb", Role.DECODE: "#bf8700"}


def figures(comparison: DayComparison) -> dict[str, Any]:
    """Return all measurements, without the worker counts over time."""
    return {
        "following": _row(comparison.following),
        "best": None if comparison.best is None else _row(comparison.best),
        "saved": comparison.saved_share,
        "fixed": [_row(fleet) for fleet in comparison.fixed],
    }


def _row(fleet: FleetResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(fleet).items() if name != "counts"}


def write(
    comparison: DayComparison,
    out: Path,
    name: str = "scaling",
    load: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a PNG file and a report with its bar; return the picture's path.

    `load` has parameters of the load that the day does not have.
    """
    day = {name: value for name, value in asdict(comparison.day).items() if name != "setup"}
    bar = results.Bar(
        name="share of the best fixed fleet's worker-hours that is saved at equal SLO",
        value=None if comparison.best is None else comparison.saved_share,
        unit="",
        target="> 0",
        met=comparison.saved_share > 0 and comparison.following.holds,
    )
    results.write_report(
        name,
        command=results.command_line(),
        seed=comparison.day.seed,
        load={**day, **load},
        figures=figures(comparison),
        bars=[bar],
        folder=results.BENCH_DIR,
    )
    out.mkdir(parents=True, exist_ok=True)
    page = out / f"{name}.png"
    page.write_bytes(draw_png(_draw, comparison))
    return page


def _draw(figure: Any, comparison: DayComparison) -> None:
    axes = figure.add_subplot()
    day = comparison.day
    minutes = [(at_ms - READY_MS) / 60_000 for at_ms, _ in comparison.following.counts]
    for role, colour in COLOURS.items():
        counts = [workers.get(role, 0) for _, workers in comparison.following.counts]
        axes.step(minutes, counts, where="post", color=colour, label=f"{role.value} workers")
    total = [sum(workers.values()) for _, workers in comparison.following.counts]
    axes.step(minutes, total, where="post", color="black", linewidth=0.8, label="all that follow")
    if comparison.best is not None:
        size = comparison.best.worker_hours * 60 / (day.minutes * day.days)
        axes.axhline(
            size, color="grey", linestyle="--", label=f"best fixed fleet, {comparison.best.pools}"
        )
    mark(axes, "minutes", "workers", legend=True)
    rate = axes.twinx()
    rate.plot(minutes, [day.per_s(60_000 * at) for at in minutes], color="#9aa5b1")
    mark(rate, y="requests/s")
