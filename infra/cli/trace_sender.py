"""Sends traffic from the command line to a running cluster, at a given pace, with a report.

Called by `trivium trace send`.
"""

import asyncio
import math
from typing import TYPE_CHECKING, Any

from infra.cli.chat import check
from infra.terminal.output import stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError, NotReady

if TYPE_CHECKING:
    from infra.traces.resend import ResendComparison
    from infra.traces.sender import MakeBody, Pace, SentRequest
    from infra.traces.trace import Trace

_SHOWN = 10  # differences that are printed
_REPORTED = (
    "time_to_first_token",
    "time_to_second_token",
    "inter_token_latency",
    "request_latency",
    "output_sequence_length",
    "input_sequence_length",
)


def pace_of(speed: str, streams: int) -> "Pace":
    """Parse a speed: a factor, max or closed. Raises ConfigError."""
    from infra.traces.sender import Pace

    if speed == "max":
        return Pace(speed=math.inf)
    if speed == "closed":
        return Pace(speed=math.inf, in_flight=streams)
    try:
        factor = float(speed)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise ConfigError(f"--speed: expected a factor above 0, max or closed, found {speed!r}")
    return Pace(speed=factor)


def send_trace(
    url: str, api_key: str, trace: "Trace", pace: "Pace", asks: "MakeBody | None" = None
) -> "tuple[list[SentRequest], dict[str, Any]]":
    """Send a trace to the gateway, with progress on stderr; return requests and the report."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    from infra.traces.report import report
    from infra.traces.sender import send

    model = _model_at(url, api_key)
    columns = TextColumn("requests ended"), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(trace.arrivals))
        sending = send(
            *(trace, url, model, pace, asks),
            api_key=api_key,
            on_end=lambda _: progress.advance(task),
        )
        responses = asyncio.run(sending)
    return responses, report(responses)


def _model_at(url: str, api_key: str) -> str:
    """Return the model that the gateway serves; raises NotReady, or the gateway's error."""
    import httpx

    try:
        headers = {"Authorization": f"Bearer {api_key}"}
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
        check(answer)
        return str(answer.json()["data"][0]["id"])
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise ConfigError(
            f"--url: expected one such as http://127.0.0.1:8000, found {url!r}"
        ) from None
    except httpx.TransportError as error:
        raise NotReady(f"no gateway at {url}: {error}; start one with `trivium up`") from error


def show_report(report: dict[str, Any]) -> None:
    """Print a trace report as text and a table."""
    from rich.table import Table

    count, failed = (report[name]["avg"] for name in ("request_count", "error_request_count"))
    print(f"answers: {count:,.0f}, errors: {failed:,.0f}")
    for error in report["error_summary"]:
        print(f"  {error['count']:,} {printable(error['error_details']['type'])}")
    if "request_throughput" in report:
        figures = ("request_throughput", "output_token_throughput", "benchmark_duration")
        print(", ".join(f"{report[n]['avg']:,} {report[n]['unit']}" for n in figures))
        columns = ("avg", "p50", "p90", "p99", "max")
        table = Table("", "unit", *columns, box=None)
        for name in (name for name in _REPORTED if name in report):
            row = report[name]
            table.add_row(name, row["unit"], *(f"{row[column]:,.1f}" for column in columns))
        stdout_console().print(table)
    if "replay_sched_lag_p99" in report:
        print(f"sent late, p99: {report['replay_sched_lag_p99']['avg']:,} ms")


def show_comparison(comparison: "ResendComparison", *, has_bodies: bool) -> None:
    """Print how the answers differ from those in the recording."""
    if not has_bodies:
        print("the recording has no prompts: prompts of the same lengths were made")
    print(
        f"completed in the recording: {comparison.completed_then:,}, "
        f"now: {comparison.completed_now:,}"
    )
    print(f"of the former, {comparison.same:,} ended the same way, with as many tokens")
    for difference in comparison.differences[:_SHOWN]:
        line = f"{difference.request_id}: recorded {difference.then}; now {difference.now}"
        print(f"  {printable(line)}")
    if len(comparison.differences) > _SHOWN:
        print(f"  and {len(comparison.differences) - _SHOWN:,} more")
    for name, (then, now) in comparison.times.items():
        print(f"{name}: recorded {then:,.1f} ms, now {now:,.1f} ms")
