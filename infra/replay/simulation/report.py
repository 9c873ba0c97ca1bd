"""Shows what a replay found out: equal effects, changed placements, and simulated figures.

All forms of `trivium replay` use it, for people and as JSON.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Console

from infra.replay.redeciding import PlacementChanges
from infra.replay.replaying import Difference, ReplayedLife, ReplayReport
from infra.replay.simulation.figures import table
from infra.terminal.printable import printable
from streams.journal.journal import version_of_core

_SHOWN_CHARS = 2_000  # of an input or an effect


@dataclass(slots=True, kw_only=True)
class Findings:
    """The results of one call; each part is empty if the call did not ask for it."""

    replayed: ReplayReport | None = None  # None for a trace, which has no decisions
    changes: PlacementChanges | None = None
    settings: dict[str, str] = field(default_factory=dict)  # the changed ones
    workers: list[str] = field(default_factory=list)  # simulated
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # figures by name
    later_ms: list[float] = field(default_factory=list)  # delays by the changes, sorted

    @property
    def is_equal(self) -> bool:
        return self.replayed is None or self.replayed.is_equal

    def as_dict(self) -> dict[str, Any]:
        """Return all parts as JSON shows them."""
        replayed = {} if self.replayed is None else _replayed_dict(self.replayed)
        changes = {} if self.changes is None else {"changes": self.changes.as_dict()}
        simulated = {"workers": self.workers, "runs": self.runs, "later_ms": self.later_ms}
        settings = {"settings": self.settings} if self.settings else {}
        return replayed | changes | settings | (simulated if self.runs else {})

    def show(self, console: Console) -> None:
        """Print all parts, one after the other."""
        lines = [] if self.replayed is None else [*_replayed_lines(self.replayed)]
        lines += [] if self.changes is None else [*_change_lines(self.changes)]
        if self.workers:
            lines.append(f"simulated workers: {', '.join(self.workers)}")
        _print_lines(console, lines)
        if self.runs:
            console.print(table(self.runs))
        if self.later_ms:
            half, worst = np.percentile(self.later_ms, 50), self.later_ms[-1]
            count = f"{len(self.later_ms):,} requests took over 100 ms longer"
            _print_lines(console, [f"{count}: p50 {half:,.0f} ms, at most {worst:,.0f} ms"])


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _change_lines(changes: PlacementChanges) -> Iterator[str]:
    count = max(1, changes.placements)
    yield (
        f"{changes.placements:,} placements; {changes.same:,} ({changes.same / count:.1%}) would "
        "be the same"
    )
    kinds = [
        *((number, f"{was}: would be {would}") for (was, would), number in
          changes.modes.most_common()),
        (changes.workers, "same mode on other workers"),
        (changes.orchestrations, "same workers in another order"),
    ]  # fmt: skip
    yield from (f"  {number:,} ({number / count:.1%}) {what}" for number, what in kinds if number)
    if changes.expected:
        yield (
            f"  the router had estimates for {changes.expected:,} of these: TTFT "
            f"{changes.ttft_ms / changes.expected:+.1f} ms, TPOT "
            f"{changes.tpot_ms / changes.expected:+.2f} ms on average"
        )
    if changes.unseen:
        yield f"  {changes.unseen:,} more placements have no decision of the shadow"


def _replayed_lines(report: ReplayReport) -> Iterator[str]:
    for life in report.lives:
        yield f"{life.router_id} epoch {life.epoch}: {_life_summary(life)}"
        if life.difference is not None:
            yield from (f"  {line}" for line in difference_lines(life, life.difference))
    wall_s, cpu_s = max(report.wall_s, 1e-3), max(report.cpu_s, 1e-3)
    yield (
        f"{'equal' if report.is_equal else 'NOT equal'}: {report.events:,} events of "
        f"{report.recorded_s:,.1f} s in {report.wall_s:.2f} s, "
        f"{report.recorded_s / wall_s:,.0f} times real time; per core "
        f"{report.recorded_s / cpu_s:,.0f} times real time, {report.events / cpu_s:,.0f} events/s"
    )


def _life_summary(life: ReplayedLife) -> str:
    summary = f"{life.events:,} events, {life.with_effects:,} with effects"
    if life.difference is not None:
        return f"{summary}; then a difference"
    if life.is_stopped:
        return f"{summary}, equal to its end"
    missing = f"; {life.unknown:,} later decisions are not in it" if life.unknown else ""
    return f"{summary}, equal up to the last line of its journal{missing}"


def difference_lines(life: ReplayedLife, difference: Difference) -> list[str]:
    """Return the first difference of an incarnation as lines: input, recorded and replayed."""
    row = difference.row
    at = datetime.fromtimestamp(row.now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    lines = [
        f"line {row.seq} at {at}, {row.topic}[{row.partition}] offset {row.offset}",
        f"input: {_short(difference.event)}",
        *(f"recorded: {_short(decision)}" for decision in difference.decided),
        f"recorded checksum of effects: {row.effects:08x}",
        *(f"replayed: {_short(effect)}" for effect in difference.effects),
    ]
    if not difference.effects:
        lines.append("replayed: no effects")
    if difference.error:
        lines.append(f"replayed: the core raised {difference.error}")
    if life.version != version_of_core():
        lines.append(f"recorded by version {life.version}, replayed by {version_of_core()}")
    return lines


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _replayed_dict(report: ReplayReport) -> dict[str, Any]:
    lives = []
    for life in report.lives:
        row: dict[str, Any] = {
            "router": life.router_id,
            "epoch": life.epoch,
            "version": life.version,
            "events": life.events,
            "first_ms": life.first_ms,
            "last_ms": life.last_ms,
            "is_stopped": life.is_stopped,
            "unknown_decisions": life.unknown,
        }
        if life.difference is not None:
            row["difference"] = difference_lines(life, life.difference)
        lives.append(row)
    names = ("is_equal", "events", "recorded_s", "wall_s", "cpu_s")
    return {name: getattr(report, name) for name in names} | {"lives": lives}
