"""`trivium replay --live`: a recording's requests at a running cluster, and how they end there."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infra.cli.sending import sent_to, show_report
from infra.terminal.output import print_json
from infra.terminal.printable import printable

if TYPE_CHECKING:
    from infra.traces.again import Compared
    from infra.traces.sending import Pace

_SHOWN = 10  # differences


def send_again(file: Path, pace: "Pace", url: str, api_key: str, *, as_json: bool) -> None:
    """Send all, compare, and say it; exit code 1 where what completed then fails now."""
    from infra.traces.again import Again

    again = Again(file)
    sent, report = sent_to(url, api_key, again.trace, pace, again.asks)
    found = again.compared(sent)
    if as_json:
        print_json(report | {"compared": asdict(found)})
    else:
        show_report(report)
        _show(found, has_bodies=again.has_bodies)
    if found.failed:
        raise typer.Exit(1)


def _show(found: "Compared", *, has_bodies: bool) -> None:
    if not has_bodies:
        print("the recording has no bodies: prompts were made, answers told how long to be")
    print(f"completed: {found.completed_then:,} then, {found.completed_now:,} now")
    print(f"of those that completed then, {found.same:,} ended the same, as long as they were")
    for each in found.differences[:_SHOWN]:
        told = f"{each.request_id}: then {each.then}; now {each.now}"
        print(f"  {printable(told)}")
    if len(found.differences) > _SHOWN:
        print(f"  and {len(found.differences) - _SHOWN:,} more")
    for name, (then, now) in found.times.items():
        print(f"{name}: {then:,.1f} ms then, {now:,.1f} ms now")
