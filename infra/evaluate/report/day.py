"""The day's rate, and the workers that were there: one picture and the figures."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra.bench import results
from infra.evaluate.report.plots import drawn
from infra.evaluate.studies.day_and_night import Compared, Fleet
from infra.simulator.cluster import READY_MS
from schemas.records import Role

COLOURS = {Role.PREFILL: "#1f6feb", Role.DECODE: "#bf8700"}


def figures(found: Compared) -> dict[str, Any]:
    """All that was measured, without who was there when."""
    return {
        "following": _row(found.following),
        "best": None if found.best is None else _row(found.best),
        "saved": found.saved,
        "fixed": [_row(fleet) for fleet in found.fixed],
    }


def _row(fleet: Fleet) -> dict[str, Any]:
    return {name: value for name, value in asdict(fleet).items() if name != "counts"}


def write(
    found: Compared,
    out: Path,
    name: str = "scaling",
    load: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """A PNG file; and a report with its bar, like those of benchmarks, and with what the day does
    not say of the load. Returns the picture."""
    day = {name: value for name, value in asdict(found.day).items() if name != "setup"}
    bar = results.Bar(
        name="share of the best fixed fleet's worker-hours that is saved at equal SLO",
        value=None if found.best is None else found.saved,
        unit="",
        target="> 0",
        met=found.saved > 0 and found.following.holds,
    )
    results.write_report(
        name,
        command=results.command_line(),
        seed=found.day.seed,
        load={**day, **load},
        figures=figures(found),
        bars=[bar],
        folder=results.BENCH_DIR,
    )
    out.mkdir(parents=True, exist_ok=True)
    page = out / f"{name}.png"
    page.write_bytes(drawn(lambda figure: _draw(figure, found)))
    return page


def _draw(figure: Any, found: Compared) -> None:
    axes = figure.add_subplot()
    day = found.day
    minutes = [(at_ms - READY_MS) / 60_000 for at_ms, _ in found.following.counts]
    for role, colour in COLOURS.items():
        counts = [there.get(role, 0) for _, there in found.following.counts]
        axes.step(minutes, counts, where="post", color=colour, label=f"{role.value} workers")
    total = [sum(there.values()) for _, there in found.following.counts]
    axes.step(minutes, total, where="post", color="black", linewidth=0.8, label="all that follow")
    if found.best is not None:
        size = found.best.worker_hours * 60 / (day.minutes * day.days)
        axes.axhline(
            size, color="grey", linestyle="--", label=f"best fixed fleet, {found.best.pools}"
        )
    axes.set_xlabel("minutes")
    axes.set_ylabel("workers")
    axes.legend(fontsize=7, loc="upper left")
    rate = axes.twinx()
    rate.plot(minutes, [day.per_s(60_000 * at) for at in minutes], color="#9aa5b1")
    rate.set_ylabel("requests/s")
