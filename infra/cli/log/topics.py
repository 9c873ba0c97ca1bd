"""Implements `trivium topics`: what each topic is for, and its state on a cluster."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.options import AsJson, Bootstrap, Config, Quiet, settings_from, settings_of_running
from infra.terminal.output import print_json, stdout_console

if TYPE_CHECKING:
    from streams.log.admin import TopicStatus

app = typer.Typer(invoke_without_command=True)


@app.callback()
def topics(context: typer.Context, config: Config = None, as_json: AsJson = False) -> None:
    """Show, create and check topics."""
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
        print(f"created: {', '.join(created)}" if created else "all topics exist")


@app.command(epilog="Example: trivium topics describe --check && trivium run router")
def describe(
    check: Annotated[
        bool,
        typer.Option("--check", help="Fail unless every topic is as the settings require it."),
    ] = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show every topic on the cluster: records, partitions, retention."""
    from streams.log.admin import describe_topics, expected_topics, verify_topics

    log = settings_of_running(config, bootstrap).log
    if check:
        asyncio.run(verify_topics(log))
        if as_json:
            print_json({"bootstrap": log.bootstrap, "topics": list(expected_topics(log))})
        elif not quiet:
            print("all topics exist, with the partition counts of the settings")
        return
    rows = asyncio.run(describe_topics(log))
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        stdout_console().print(_table(rows))


def _table(rows: "list[TopicStatus]") -> object:
    from rich.table import Table

    table = Table("topic", "records", "partitions", "cleanup", "kept", box=None)
    for row in rows:
        count = str(row.found or "missing")
        partitions = count if row.fits else f"[red]{count}, expected {row.expected}[/red]"
        retention = "-" if row.cleanup == "compact" else f"{row.retention_ms / 3_600_000:g} h"
        table.add_row(row.name, row.records, partitions, row.cleanup, retention)
    return table


@app.command(
    epilog="Examples: trivium topics asyncapi --html topics.html, "
    "trivium topics asyncapi | jq .channels"
)
def asyncapi(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead of printing.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page to read, which needs no internet.")
    ] = None,
) -> None:
    """Print the AsyncAPI document of all topics and records, or write it as a page."""
    from schemas.generate.asyncapi import asyncapi_document, asyncapi_text
    from schemas.generate.asyncapi_page import asyncapi_page

    if html is not None:
        html.write_text(asyncapi_page(asyncapi_document()), encoding="utf-8")
    if output is not None:
        output.write_text(asyncapi_text())
    elif html is None:
        print(asyncapi_text(), end="")
