"""Implements `trivium restart`: restarts processes of a running stack, one after the other."""

import asyncio
from typing import Annotated

import typer

from infra.cli.options import AsJson
from infra.terminal.output import print_json


def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of the processes.", show_default="all")
    ] = None,
    each_s: Annotated[float, typer.Option(min=1, help="Seconds to wait for each.")] = 240,
    as_json: AsJson = False,
) -> None:
    """Restart its processes under load, one by one.

    Restart processes of `trivium up` one after the other, under load.

    Each process finishes its work before it ends, and the next one follows when all are ready. For
    no downtime, run two of each kind, and a load balancer before the gateways. Even then, a request
    on a connection that is just closing may get no answer: send it again.

    Examples: `trivium restart`, `trivium restart gateway-0 gateway-1`
    """
    from infra.stack.rolling import restart as restart_each

    away_s: dict[str, float] = {}

    def report(name: str, seconds: float) -> None:
        away_s[name] = round(seconds, 1)
        if not as_json:
            print(f"{name} is ready again, after {seconds:.1f} s", flush=True)

    asyncio.run(restart_each(names or (), folder=None, process_timeout_s=each_s, on_restart=report))
    if as_json:
        print_json(away_s)
