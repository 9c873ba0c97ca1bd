"""Implements `trivium topics`: what each topic is for, and its state on a cluster."""

import asyncio
from dataclasses import asdict

import typer

from infra.cli.options import AsJson, Bootstrap, Config, Quiet, settings_from, settings_of_running
from infra.terminal.output import print_json, stdout_console

app = typer.Typer(invoke_without_command=True)


@app.callback()
def topics(context: typer.Context, config: Config = None, as_json: AsJson = False) -> None:
    """Say what topics are for; create them, check them, show them as they are."""
    if context.invoked_subcommand is None:
        list_(config, as_json)


@app.command("list", epilog="Example: trivium topics --json | jq '.[] | select(.key == \"any\")'")
def list_(config: Config = None, as_json: AsJson = False) -> None:
    """Show every topic's writers, readers, key, records and retention.

    At most one process of the kind that it scales can work on each partition. No broker is needed.
    """
    from rich.table import Table

    from schemas.generate.topics_table import COLUMNS, about_topics, cells

    rows = about_topics(settings_from(config).log)
    if as_json:
        print_json(rows)
        return
    table = Table(*COLUMNS, box=None)
    for row in rows:
        table.add_row(*cells(row))
    stdout_console().print(table)


@app.command(epilog="Example: trivium topics create --bootstrap kafka:9092")
def create(config: Config = None, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Create missing topics; safe to repeat. Fails where partition counts differ."""
    from streams.log.admin import create_topics

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
    """Exit with an error unless every topic exists as the settings require."""
    from streams.log.admin import expected_topics, verify_topics

    log = settings_of_running(config, bootstrap).log
    asyncio.run(verify_topics(log))
    if as_json:
        print_json({"bootstrap": log.bootstrap, "topics": list(expected_topics(log))})
    elif not quiet:
        print("all topics are there, with the partition counts of the settings")


@app.command(epilog="Example: trivium topics describe --json | jq '.[] | select(.found == 0)'")
def describe(config: Config = None, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Show every topic: records, partitions, retention."""
    from rich.table import Table

    from streams.log.admin import describe_topics

    rows = asyncio.run(describe_topics(settings_of_running(config, bootstrap).log))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table("topic", "records", "partitions", "cleanup", "kept", box=None)
    for row in rows:
        there = "missing" if not row.found else str(row.found)
        partitions = there if row.fits else f"[red]{there}, expected {row.expected}[/red]"
        retention = "-" if row.cleanup == "compact" else f"{row.retention_ms / 3_600_000:g} h"
        table.add_row(row.name, row.records, partitions, row.cleanup, retention)
    stdout_console().print(table)
