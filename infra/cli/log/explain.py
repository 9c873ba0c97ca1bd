"""Implements `trivium explain REQUEST_ID`: the history of a request from the log."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.story.record_finder import Progress
    from infra.story.story import Story
    from schemas.settings import LogSettings

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="Header x-trivium-request-id, the answer's id, or the start of either.",
        ),
    ],
    since: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="How far back to look for an id that contains no time: 90s, 30m, 2h, 1d.",
        ),
    ] = "1h",
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Show what happened to a request, and why.

    Show what happened to a request: decisions and why, KV transfers, tokens, outcome.

    Examples: `trivium explain r01m7yr198f`, `trivium explain chatcmpl-r01m7yr198fcw... --json`,
    `trivium explain r01m7y --since 30m`
    """
    from infra.story.screen import as_json_value, show

    since_ms = duration_ms(since)
    story = asyncio.run(_read(settings_of_running(config, bootstrap).log, request_id, since_ms))
    if as_json:
        print_json(as_json_value(story))
    else:
        show(story, stdout_console())


def duration_ms(text: str, option: str = "--since") -> int:
    """Parse a duration such as 30m, into ms; raises ConfigError."""
    duration = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text.strip())
    if duration is None:
        raise ConfigError(
            f"{option}: expected a duration such as 90s, 30m, 2h or 1d, found {text!r}"
        )
    return int(duration[1]) * _UNITS_MS[duration[2]]


async def _read(log: "LogSettings", name: str, since_ms: int) -> "Story":
    from infra.story.record_finder import read_story

    with _progress() as progress:
        return await read_story(log, name, since_ms=since_ms, progress=progress)


@contextlib.contextmanager
def _progress() -> Iterator["Progress"]:
    """Show one bar per topic on standard error if it is a terminal, until all is read."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def advance(topic: str, passed: int, total: int) -> None:
            if topic not in tasks:
                tasks[topic] = bars.add_task(f"reading {topic}")
            bars.update(tasks[topic], completed=passed, total=total)

        yield advance
