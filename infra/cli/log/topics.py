"""`trivium topics`: the topics of the table, on whichever cluster."""

import asyncio
from dataclasses import asdict

import typer

from infra.cli.options import AsJson, Bootstrap, Config, Quiet, settings_of_running
from infra.terminal.output import print_json, stdout_console

app = typer.Typer(
    help="Create the topics, check them, show them.",
    no_args_is_help=True,
)


@app.command(epilog="Example: trivium topics create --bootstrap kafka:9092")
def create(config: Config = None, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Create what is missing; safe to repeat. Refuses other partition counts."""
    from schemas.log.admin import create_topics

    created = asyncio.run(create_topics(settings_of_running(config, bootstrap).log))
    if as_json:
        print_json({"created": created})
    else:
        print(f"created: {', '.join(created)}" if created else "all topics are there")


@app.command(epilog="Example: trivium topics verify && trivium worker --role prefill")
def verify(
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Exit with an error unless every topic is there as the settings want it."""
    from schemas.log.admin import verify_topics, wanted_topics

    log = settings_of_running(config, bootstrap).log
    asyncio.run(verify_topics(log))
    if as_json:
        print_json({"bootstrap": log.bootstrap, "topics": list(wanted_topics(log))})
    elif not quiet:
        print("all topics are there, with the partition counts of the settings")


@app.command(epilog="Example: trivium topics describe --json | jq '.[] | select(.found == 0)'")
def describe(config: Config = None, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Show every topic: records, partitions, how long it is kept."""
    from rich.table import Table

    from schemas.log.admin import describe_topics

    rows = asyncio.run(describe_topics(settings_of_running(config, bootstrap).log))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table("topic", "records", "partitions", "cleanup", "kept", box=None)
    for row in rows:
        there = "missing" if not row.found else str(row.found)
        partitions = there if row.fits else f"[red]{there}, expected {row.expected}[/red]"
        kept = "-" if row.cleanup == "compact" else f"{row.retention_ms / 3_600_000:g} h"
        table.add_row(row.name, row.records, partitions, row.cleanup, kept)
    stdout_console().print(table)
