"""Implements `trivium scale`: how many workers each pool wants, from queues and arrivals."""

import asyncio
import contextlib
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import NotReady

if TYPE_CHECKING:
    from infra.scaling.scaler import Scaler, ScalingPlan
    from infra.stack.configuration import Settings
    from infra.stack.fleet_watch import FleetWatch
    from schemas.records import Backlog

_LOOK_S = 1.0


def scale(
    watch: Annotated[bool, typer.Option("--watch", help="Repeat once a second.")] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="Repeat, and write the counts to the topic fleet.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Show how many workers are wanted, and why.

    Show how many prefill, decode, replica and retrieval workers are wanted, and why.

    The counts follow from queues at the routers, arrivals, and times of workers. Targets and bounds
    are section \\[scaling] of the settings. `trivium up --autoscale` follows the counts. Examples:
    `trivium scale --json | jq '.pools[] | {role, workers}'`, `trivium scale --publish`
    """
    settings = settings_of_running(config, bootstrap)
    if watch or publish:
        asyncio.run(_watch(settings, publish, as_json))
    else:
        asyncio.run(_once(settings, as_json))


async def _once(settings: "Settings", as_json: bool) -> None:
    from infra.scaling.scaler import Scaler
    from infra.stack.fleet_watch import FleetWatch
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, settings.log)
    async with FleetWatch(settings.log, codec).followed() as fleet:
        look = await first_look(Scaler(settings.scaling), fleet)
    if look is None:
        raise NotReady(
            "no router has reported; start one with `trivium up` or `trivium run router`"
        )
    _show(look, as_json)


async def first_look(scaler: "Scaler", fleet: "FleetWatch") -> "ScalingPlan | None":
    """Return the first plan; wait up to `SLOW_S` for a router that is known but silent.

    Returns None where there is no router, or none has reported. `fleet` must be followed.
    """
    from infra.stack import fleet_watch
    from streams.log.clock import wall_ms

    look = scaler.plan(fleet.view, wall_ms())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(fleet_watch.SLOW_S):
            while look is None and _knows_a_router(fleet):
                await fleet_watch.wait_for_update(fleet)
                look = scaler.plan(fleet.view, wall_ms())
    return look


def _knows_a_router(fleet: "FleetWatch") -> bool:
    from schemas.records import MemberKind, MemberState

    return any(
        member.registration.kind is MemberKind.ROUTER and member.state is not MemberState.GONE
        for member in fleet.view.members.values()
    )


async def _watch(settings: "Settings", publish: bool, as_json: bool) -> None:
    from infra.scaling.scaler import Scaler
    from infra.stack.announcer import Announcer
    from infra.stack.fleet_watch import FleetWatch
    from streams.log.clients import LogProducer
    from streams.log.clock import wall_ms
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, settings.log)
    scaler = Scaler(settings.scaling)
    making = LogProducer(settings.log, codec, durable=True, client_id="trivium-scale")
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(FleetWatch(settings.log, codec).followed())
        producer = await stack.enter_async_context(making) if publish else making
        announcer = Announcer(producer, "scale")
        while True:
            look = scaler.plan(fleet.view, wall_ms())
            if look is not None:
                if publish:
                    await announcer.announce(look.pools, wall_ms())
                if not as_json and sys.stdout.isatty():
                    stdout_console().clear()
                _show(look, as_json)
            await asyncio.sleep(_LOOK_S)


def _show(look: "ScalingPlan", as_json: bool) -> None:
    if as_json:
        print_json(_tree(look))
    else:
        stdout_console().print(_table(look))


def _tree(look: "ScalingPlan") -> dict[str, Any]:
    pools = [{**asdict(pool), "role": pool.role.value} for pool in look.pools]
    backlogs = [asdict(backlog) for backlog in look.backlogs]
    only = {"backlog": backlogs[0]} if len(backlogs) == 1 else {}
    return {**only, "backlogs": backlogs, "pools": pools}


def _table(look: "ScalingPlan") -> Any:
    from rich.table import Table
    from rich.text import Text

    models = ["model"] * (len(look.backlogs) > 1)
    title = Text(
        "\n".join(
            f"{printable(backlog.model)}: " * len(models) + _backlog_words(backlog)
            for backlog in look.backlogs
        )
    )
    heads = (*models, "pool", "has", "wants", "work", "why")
    table = Table(*heads, box=None, title=title, title_justify="left")
    table.columns[-1].overflow = "fold"
    for pool in look.pools:
        numbers = (str(pool.present), str(pool.workers), f"{pool.work:.2f}")
        model = [Text(printable(pool.model))] * len(models)
        table.add_row(*model, pool.role.value, *numbers, pool.why)
    return table


def _backlog_words(backlog: "Backlog") -> str:
    words = f"{backlog.requests_per_s:.1f} requests/s; {backlog.waiting} wait"
    if backlog.waiting:
        words += f", the oldest for {backlog.oldest_ms / 1_000:.1f} s"
    return words
