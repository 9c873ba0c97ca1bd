"""Implements `trivium trace`: converts, shows and sends traffic traces."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.log.explain import duration_ms
from infra.cli.options import (
    ApiKey,
    AsJson,
    Bootstrap,
    Config,
    gateway_url,
    in_panel,
    settings_of_running,
)
from infra.cli.trace_sender import pace_of, send_trace, show_comparison, show_report
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.traces.resend import Resend
    from infra.traces.trace import Trace

LOG = "log"  # in place of a file: this deployment's own traffic
_BARS = 60
_FIGURES = ("prompt_tokens", "output_tokens", "ttft_ms", "total_ms")

app = typer.Typer(help="Convert, show and send traffic traces.")

_PART = in_panel("Which part")
Source = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="A file of a known format, or log: this deployment's traffic."
    ),
]
Since = Annotated[
    str, _PART(metavar="DURATION", help="How far back to read the log: 90s, 30m, 2h, 7d.")
]
Requests = Annotated[int, _PART(min=0, help="Number of requests, from the first; 0: all.")]
Scale = Annotated[float, _PART(min=0.0001, help="Factor on all lengths, such as 0.0625.")]


@app.callback()
def _group() -> None:
    """Convert, show and send traffic traces.

    It reads Azure's and BurstGPT's CSV, Mooncake's JSON lines, agentic Mooncake version 2,
    dynamo.request.trace.v1, OpenTelemetry gen_ai spans as OTLP JSON, and files of trivium record.
    """


@app.command("convert")
def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="Format: mooncake, dynamo or aiperf.")],
    model: Annotated[str, typer.Option(help="Model, if the trace names none.")] = "model",
    since: Since = "1h",
    requests: Requests = 0,
    scale: Scale = 1.0,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Write a trace in another format. Texts are never written: lengths, times and block ids are.

    Examples: `trivium trace convert azure.csv trace.jsonl --to mooncake`,
    `trivium trace convert log today.jsonl --to dynamo --since 1d`,
    `trivium trace convert trace.jsonl inputs.json --to aiperf --model sim`
    """
    from infra.traces.formats import write

    trace = _part(_read(source, since, config, bootstrap), requests, scale)
    write(trace, target, to, model)
    print(f"{target}: {len(trace.arrivals)} requests as {to}{_left_out(trace)}")


@app.command("show")
def show(
    source: Source,
    since: Since = "1h",
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Show what a trace has: requests, sessions, rates, lengths, and the share of common prefixes.

    Examples: `trivium trace show trace.jsonl`, `trivium trace show log --since 30m --json`
    """
    from rich.table import Table

    from infra.traces.summary import bars, summary

    trace = _read(source, since, config, bootstrap)
    figures = summary(trace)
    if as_json:
        print_json(figures)
        return
    console = stdout_console()
    print(
        f"{figures['format']}: {figures['requests']:,} requests in {figures['duration_s']:,.0f} s, "
        f"{figures['sessions']:,} sessions{_left_out(trace)}"
    )
    print(f"requests/s: {figures['mean_per_s']:,} on average, {figures['busiest_per_s']:,} at most")
    print(f"prompt tokens in prefixes that came before: {figures['begins_alike']:.1%}")
    table = Table("", *(figures["prompt_tokens"]), box=None)
    for name in _FIGURES:
        if figures[name]:
            table.add_row(name, *(f"{value:,.0f}" for value in figures[name].values()))
    console.print(table)
    print(f"requests       {bars(trace, _BARS)}")
    print(f"prompt tokens  {bars(trace, _BARS, 'prompt_tokens')}")
    print(f"answer tokens  {bars(trace, _BARS, 'output_tokens')}")


@app.command("send")
def send(
    source: Source,
    speed: Annotated[
        str, typer.Option(metavar="SPEED", help="Speed: a factor such as 1 or 10, max, or closed.")
    ] = "1",
    streams: Annotated[
        int, typer.Option(min=1, max=4_096, help="Requests at a time with closed.")
    ] = 8,
    url: Annotated[
        str | None,
        typer.Option(help="Address of the gateway.", show_default="the one that runs here"),
    ] = None,
    api_key: ApiKey = "none",
    since: Since = "1h",
    requests: Requests = 0,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Send a trace's traffic to a gateway, and report the results as aiperf does.

    Prompts are made from lengths and block ids; answers are as long as the trace's. A turn waits
    for the end of the one before it, at any speed. With max, no request waits for its time; with
    closed, `--streams` requests at a time are in flight. Exit code 1 if a request failed.

    A recording's own prompts are sent, with their sampling and seeds, unless it has none or
    `--scale` is given, and the answers are compared with the recorded ones. Exit code 1 if a
    request fails that completed in the recording.

    Examples: `trivium trace send trace.jsonl --requests 20 --scale 0.01`,
    `trivium trace send azure.csv --speed 10 --json`,
    `trivium trace send last.avro --url http://127.0.0.1:8000`,
    `trivium trace send log --since 10m --speed closed --streams 16`
    """
    pace, resend = pace_of(speed, streams), _resend(source) if scale == 1.0 else None
    whole = resend.trace if resend else _read(source, since, config, bootstrap)
    trace, make_body = _part(whole, requests, scale), resend.make_body if resend else None
    responses, report = send_trace(url or gateway_url(config), api_key, trace, pace, make_body)
    comparison = resend and resend.compare(responses)
    if as_json:
        print_json(report | ({"compared": asdict(comparison)} if comparison else {}))
    else:
        show_report(report)
    if resend and comparison and not as_json:
        show_comparison(comparison, has_bodies=resend.has_bodies)
    if comparison.failed if comparison else any(response.error for response in responses):
        raise typer.Exit(1)


def _resend(source: str) -> "Resend | None":
    """Return the requests of a recording, or None for any other source."""
    from infra.traces.formats import is_recording

    if source == LOG or not is_recording(Path(source)):
        return None
    from infra.traces.resend import Resend

    return Resend(Path(source))


def _read(source: str, since: str, config: Path | None, bootstrap: str | None) -> "Trace":
    if source != LOG:
        from infra.traces.formats import read

        return read(Path(source))
    from infra.traces.from_log import read_log
    from streams.log.clock import wall_ms

    now_ms = wall_ms()
    log = settings_of_running(config, bootstrap).log
    trace = asyncio.run(read_log(log, now_ms - duration_ms(since), now_ms))
    if not trace.arrivals:
        raise ConfigError(f"log: expected requests that have ended within {since}, found none")
    return trace


def _part(trace: "Trace", requests: int, scale: float) -> "Trace":
    from infra.traces.trace import head, scale_trace

    if requests:
        trace = head(trace, requests)
    return scale_trace(trace, scale) if scale != 1.0 else trace


def _left_out(trace: "Trace") -> str:
    reasons = [f"{count:,} {what}" for what, count in trace.left_out.items()]
    return f"; left out: {printable(', '.join(reasons))}" if reasons else ""
