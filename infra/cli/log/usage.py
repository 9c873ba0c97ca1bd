"""Implements `trivium usage`: sums what requests have used, from the log."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.log.explain import duration_ms
from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.story.usage import Check, Sums
    from schemas.settings import LogSettings

_COLUMNS = {
    "requests": "requests",
    "completed": "completed",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "cached",
    "retrieved_tokens": "retrieved",
    "completion_tokens": "completion tokens",
    "reasoning_tokens": "reasoning",
    "worker_s": "worker s",
}


def usage(
    by: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Group by tenant, model, class, hour, endpoint or kind; with commas.",
        ),
    ] = "tenant,model,class",
    since: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="How far back: 90s, 30m, 2h, 7d.", show_default="all of it"
        ),
    ] = "",
    check: Annotated[
        bool,
        typer.Option("--check", help="Look for gaps and repeats; exit code 1 if there are any."),
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Sum up what requests have used.

    Examples: `trivium usage`, `trivium usage --by tenant,hour --since 1d --json`,
    `trivium usage --check`
    """
    from streams.log.clock import wall_ms

    names = _names(by)
    since_ms = wall_ms() - duration_ms(since) if since else 0
    log = settings_of_running(config, bootstrap).log
    sums, audit = asyncio.run(_read(log, names, since_ms, check=check))
    if as_json:
        report: dict[str, Any] = {"by": names, "sums": sums.rows(), "total": asdict(sums.total)}
        if audit is not None:
            report["check"] = {"gaps": audit.gaps, "repeats": audit.repeats}
        print_json(report)
    else:
        _show(sums, audit)
    if audit is not None and not audit.holds:
        raise typer.Exit(1)


def _names(by: str) -> list[str]:
    from infra.story.usage import BY

    names = [name.strip() for name in by.split(",") if name.strip()]
    for name in names:
        if name not in BY:
            raise ConfigError(f"--by: expected any of {', '.join(BY)}, found {name!r}")
    return list(dict.fromkeys(names))


async def _read(
    log: "LogSettings", names: list[str], since_ms: int, *, check: bool
) -> "tuple[Sums, Check | None]":
    from infra.story.usage import Check, Sums, read_usage

    sums, audit = Sums(names), Check() if check else None
    async for partition, usage in read_usage(log, since_ms):
        sums.add(usage)
        if audit is not None:
            audit.add(partition, usage)
    return sums, audit


def _show(sums: "Sums", audit: "Check | None") -> None:
    from rich.table import Table

    from infra.story.usage import NAMED_MAX

    table = Table(*sums.by, box=None)
    for header in _COLUMNS.values():
        table.add_column(header, justify="right")
    for row in sums.rows():
        table.add_row(*(printable(row[name]) or "-" for name in sums.by), *_cells(row))
    if sums.by:
        names = ["all", *[""] * (len(sums.by) - 1)]
        table.add_row(*names, *_cells(asdict(sums.total)))
    stdout_console().print(table)
    if audit is None:
        return
    for what, wrong in (("gaps", audit.gaps), ("repeats", audit.repeats)):
        print(f"{what}: {len(wrong) or 'none'}")
        for line in wrong[:NAMED_MAX]:
            print(f"  {printable(line)}")


def _cells(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:,.1f}" if name == "worker_s" else f"{row[name]:,}" for name in _COLUMNS]
