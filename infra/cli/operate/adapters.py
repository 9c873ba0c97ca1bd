"""Implements `trivium adapters`: the LoRA adapters of the fleet, and which workers have them."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable

if TYPE_CHECKING:
    from schemas.fleet import FleetView
    from schemas.settings import LogSettings, ModelSettings


def adapters(
    model: Annotated[
        str | None, typer.Option(help="Only those over this model.", show_default="all")
    ] = None,
    usage: Annotated[
        bool, typer.Option("--usage", help="Count the requests that have ended, from the log.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Show LoRA adapters, and which workers have them.

    A call names an adapter as its model. Requests go to workers that have loaded it, and a worker
    that has not loads it. The settings name the folders; of adapters that only other settings name,
    folder and rank are empty.

    Examples: `trivium adapters`, `trivium adapters --json | jq '.[] | {adapter, loaded}'`
    """
    settings = settings_of_running(config, bootstrap)
    rows = with_files(asyncio.run(_rows(settings.log)), settings.models)
    rows = [row for row in rows if model in (None, row["model"])]
    if usage:
        counts = asyncio.run(_counts(settings.log))
        rows = [{**row, "requests": counts.get(row["adapter"], 0)} for row in rows]
    if as_json:
        print_json(rows)
    else:
        stdout_console().print(table_of(rows))


async def _rows(log: "LogSettings") -> list[dict[str, Any]]:
    from infra.stack.fleet_watch import FleetWatch
    from streams.log.clock import wall_ms
    from streams.log.registry import make_codec

    async with FleetWatch(log, await asyncio.to_thread(make_codec, log)) as fleet:
        return rows_of(fleet.view, wall_ms())


async def _counts(log: "LogSettings") -> dict[str, int]:
    """Return how many requests have ended, by the name of the model or adapter."""
    from infra.story.usage import Sums, read_usage

    sums = Sums(["model"])
    async for _, record in read_usage(log):
        sums.add(record)
    return {row["model"]: row["requests"] for row in sums.rows()}


def rows_of(view: "FleetView", now_ms: int) -> list[dict[str, Any]]:
    """Return a row for each adapter of each model, with the living workers that can load it and
    those that have."""
    from schemas.records import MemberKind

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for worker in view.living(MemberKind.WORKER, now_ms):
        engine = worker.registration.capability
        if engine is None:
            continue
        for name in engine.adapters:
            row = rows.setdefault(
                (engine.model, name),
                {"adapter": name, "model": engine.model, "workers": [], "loaded": []},
            )
            row["workers"].append(worker.member_id)
            if name in worker.load.adapters:
                row["loaded"].append(worker.member_id)
    return [rows[key] for key in sorted(rows)]


def with_files(
    rows: Iterable[dict[str, Any]], models: Iterable["ModelSettings"]
) -> list[dict[str, Any]]:
    """Add folder and rank of each adapter of these settings, "" and 0 where nothing is known, and
    rows for those that no worker has."""
    from schemas.model.adapters import rank_of

    folders = {
        name: (model.served_name, folder)
        for model in models
        for name, folder in model.adapters.items()
    }
    by_name = {row["adapter"]: row for row in rows}
    for name, (model_name, _) in folders.items():
        absent = {"adapter": name, "model": model_name, "workers": [], "loaded": []}
        by_name.setdefault(name, absent)
    for name, row in by_name.items():
        _, folder = folders.get(name, ("", ""))
        row |= {"folder": folder, "rank": rank_of(folder) if folder else 0}
    return sorted(by_name.values(), key=lambda row: (row["model"], row["adapter"]))


def table_of(rows: list[dict[str, Any]]) -> Any:
    """Return the rows as a table, or a sentence if there are none."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text("no worker has an adapter; name some in model.adapters of the settings")
    heads = ["adapter", "model", "rank", "loaded by", "can be loaded by", "folder"]
    has_counts = "requests" in rows[0]
    table = Table(*heads, *["requests"] * has_counts, box=None)
    for row in rows:
        loaded, workers = (", ".join(row[key]) or "none" for key in ("loaded", "workers"))
        name, model, folder = (Text(printable(row[key])) for key in ("adapter", "model", "folder"))
        counts = [str(row["requests"])] if has_counts else []
        table.add_row(name, model, str(row["rank"] or "-"), loaded, workers, folder, *counts)
    return table
