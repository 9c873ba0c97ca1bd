"""Implements `trivium pool`: moves running workers between pools, and between models."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, roles_from, settings_of_running
from infra.terminal.output import print_json
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.settings import LogSettings

_MOVE_S, _LOAD_S = 30.0, 240.0

app = typer.Typer(
    help="Move workers between pools and models.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Move workers between pools and models."""


@app.command(epilog="Example: trivium pool move prefill-1 --to decode")
def move(
    worker: Annotated[str, typer.Argument(help="Id of the worker; `trivium status` shows ids.")],
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="New role: prefill, decode or replica; several with a comma."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the model to serve from now on.")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds to wait.", show_default="30, or 240 for another model"),
    ] = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Give a worker other roles, or another model; it finishes its requests first.

    With other roles, it keeps its engine and caches. With another model, `trivium up` restarts it:
    it drains, loads the model, and joins again. Where it runs without `trivium up`, restart it by
    hand with another `--model`.

    Examples: `trivium pool move decode-0 --to prefill`, `trivium pool move decode-0 --to
    prefill,decode`, `trivium pool move decode-1 --model large`. A worker of `trivium up` that is
    restarted keeps its roles and its model. A worker started by hand, or by another `trivium up`,
    has those of its command line again.
    """
    if (model is None) == (not to):
        raise ConfigError("pool move: expected either --to or --model")
    if model is not None:
        asyncio.run(_load(worker, model, timeout_s or _LOAD_S, as_json))
        return
    roles = roles_from(to or [], "--to")
    log = settings_of_running(config, bootstrap).log
    asyncio.run(_move(log, worker, roles, timeout_s or _MOVE_S, as_json))


async def _load(worker_id: str, model: str, timeout_s: float, as_json: bool) -> None:
    from rich.console import Console

    from infra.stack.rolling import load_model

    began_s = time.monotonic()
    with Console(stderr=True).status(f"{worker_id}: drains, and loads {printable(model)}"):
        before = await load_model(worker_id, model, folder=None, process_timeout_s=timeout_s)
    took_s = time.monotonic() - began_s
    if as_json:
        took_ms = round(1_000 * took_s)
        names = {"worker_id": worker_id, "model_before": before, "model": model}
        print_json({**names, "took_ms": took_ms})
    else:
        print(f"{worker_id}: serves {model} now instead of {before}, after {took_s:.1f} s")


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
