"""Implements `trivium bridge`: one bridge in the foreground, and the lag of all of them."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from infra.cli.operate import single_process
from infra.cli.operate.single_process import Id, LogLevel
from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console

if TYPE_CHECKING:
    from infra.stack.bridge_lag import Lag

app = typer.Typer(invoke_without_command=True)


@app.callback(epilog="Example: trivium bridge --id bridge-1 --bootstrap kafka:9092")
def bridge(
    context: typer.Context,
    member_id: Id = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one bridge: prompts from topics, one answer each, to topics. Several share partitions."""
    if context.invoked_subcommand is None:
        single_process.bridge(member_id, config, bootstrap, log_level)


@app.command(epilog="Example: trivium bridge status --json | jq '[.[].lag] | add'")
def status(config: Config = None, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Show how far prompts are answered: records and time behind, owner and rate by partition.

    It asks Kafka alone, so it also works while bridges are down.
    """
    from infra.stack.bridge_lag import bridge_lags

    settings = settings_of_running(config, bootstrap)
    rows = asyncio.run(bridge_lags(settings.log, settings.bridge))
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        stdout_console().print(_table(rows))


def _table(rows: "list[Lag]") -> object:
    from rich.table import Table

    columns = ("pair", "partition", "position", "end", "lag", "oldest", "answers/s", "bridge")
    table = Table(*columns, box=None)
    for row in rows:
        oldest = f"{row.oldest_ms / 1_000:.1f} s" if row.lag else "-"
        numbers = map(str, (row.partition, row.position, row.end, row.lag))
        table.add_row(row.pair, *numbers, oldest, f"{row.answers_per_s:g}", row.owner or "nobody")
    return table
