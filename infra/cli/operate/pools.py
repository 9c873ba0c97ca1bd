"""Implements `trivium pool`: moves running workers between pools."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, roles_from, settings_of_running
from infra.terminal.output import print_json

if TYPE_CHECKING:
    from schemas.settings import LogSettings

app = typer.Typer(
    help="Move workers between pools, without a restart.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Move workers between pools, without a restart."""


@app.command(epilog="Example: trivium pool move prefill-1 --to decode")
def move(
    worker: Annotated[str, typer.Argument(help="Id of the worker; `trivium status` shows ids.")],
    to: Annotated[
        list[str],
        typer.Option("--to", help="New role: prefill, decode or replica; several with a comma."),
    ],
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the fleet.")] = 30,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Give a worker other roles; it finishes its requests and keeps its engine and caches.

    Examples: `trivium pool move decode-0 --to prefill`, `trivium pool move decode-0 --to
    prefill,decode`. A worker of `trivium up` that is restarted keeps these roles. A worker started
    by hand, or by another `trivium up`, has the roles of its command line again.
    """
    roles = roles_from(to, "--to")
    log = settings_of_running(config, bootstrap).log
    asyncio.run(_move(log, worker, roles, timeout_s, as_json))


async def _move(
    log: "LogSettings", worker_id: str, roles: list[Any], timeout_s: float, as_json: bool
) -> None:
    from rich.console import Console

    from infra.stack.fleet_watch import FleetWatch
    from infra.stack.reassignment import move_worker, wait_for_worker
    from streams.log.clients import LogProducer
    from streams.log.clock import wall_ms
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, log)
    making = LogProducer(log, codec, durable=True, client_id="trivium-pool")
    async with FleetWatch(log, codec).followed() as fleet:
        member = await wait_for_worker(fleet, worker_id)
        before = [role.value for role in member.registration.roles]
        target, began_ms = " and ".join(roles), wall_ms()
        with Console(stderr=True).status(f"{worker_id}: {' and '.join(before)} becomes {target}"):
            async with making as producer:
                await move_worker(fleet, producer, log, worker_id, roles, timeout_s=timeout_s)
    took_ms = wall_ms() - began_ms
    if as_json:
        print_json({"worker_id": worker_id, "before": before, "roles": roles, "took_ms": took_ms})
    else:
        print(f"{worker_id}: {' and '.join(before)} is now {target}, after {took_ms / 1000:.1f} s")
