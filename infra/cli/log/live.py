"""Implements `trivium replay --live`: sends a recording's requests, and compares the outcomes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infra.cli.trace_sender import send_trace, show_report
from infra.terminal.output import print_json
from infra.terminal.printable import printable

if TYPE_CHECKING:
    from infra.traces.resend import ResendComparison
    from infra.traces.sender import Pace

_SHOWN = 10  # differences that are printed


def resend(file: Path, pace: "Pace", url: str, api_key: str, *, as_json: bool) -> None:
    """Send all requests, compare and report; exit code 1 if one that completed then fails now."""
    from infra.traces.resend import Resend

    resender = Resend(file)
    responses, report = send_trace(url, api_key, resender.trace, pace, resender.make_body)
    comparison = resender.compare(responses)
    if as_json:
        print_json(report | {"compared": asdict(comparison)})
    else:
        show_report(report)
        _show(comparison, has_bodies=resender.has_bodies)
    if comparison.failed:
        raise typer.Exit(1)


def _show(comparison: "ResendComparison", *, has_bodies: bool) -> None:
    if not has_bodies:
        print("the recording has no bodies: prompts were made, answers told how long to be")
    print(f"completed: {comparison.completed_then:,} then, {comparison.completed_now:,} now")
    print(f"of those that completed then, {comparison.same:,} ended the same, as long as they were")
    for difference in comparison.differences[:_SHOWN]:
        line = f"{difference.request_id}: then {difference.then}; now {difference.now}"
        print(f"  {printable(line)}")
    if len(comparison.differences) > _SHOWN:
        print(f"  and {len(comparison.differences) - _SHOWN:,} more")
    for name, (then, now) in comparison.times.items():
        print(f"{name}: {then:,.1f} ms then, {now:,.1f} ms now")
