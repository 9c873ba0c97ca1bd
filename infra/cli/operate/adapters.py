"""Implements `trivium adapters`: the LoRA adapters of the fleet, and which workers have them."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable

if TYPE_CHECKING:
    from schemas.fleet import FleetView
    from schemas.settings import LogSettings


def adapters(
    model: Annotated[
        str | None, typer.Option(help="Only those over this model.", show_default="all")
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Show LoRA adapters, and which workers have them.

    A call names an adapter as its model. A worker loads it when the first call comes, and requests
    go to workers that have loaded it already. The settings name the folders of adapters.

    Examples: `trivium adapters`, `trivium adapters --json | jq '.[] | {adapter, loaded}'`
    """
    rows = asyncio.run(_rows(settings_of_running(config, bootstrap).log))
    rows = [row for row in rows if model in (None, row["model"])]
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


def table_of(rows: list[dict[str, Any]]) -> Any:
    """Return the rows as a table, or a sentence if there are none."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text("no worker has an adapter; name some in model.adapters of the settings")
    table = Table("adapter", "model", "loaded by", "can be loaded by", box=None)
    for row in rows:
        loaded, workers = (", ".join(row[key]) or "none" for key in ("loaded", "workers"))
        table.add_row(
            *(Text(printable(t)) for t in (row["adapter"], row["model"])), loaded, workers
        )
    return table
