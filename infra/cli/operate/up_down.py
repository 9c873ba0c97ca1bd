"""Implements `trivium up` and `trivium down`: a whole deployment on this machine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    AsJson,
    Bootstrap,
    Config,
    Engine,
    Quiet,
    names_broker,
    settings_from,
)
from infra.processes.identity import GRACE_S, PRIVATE
from infra.stack.statefile import StackState, read_state
from infra.terminal.output import print_json
from schemas.errors import ConfigError, NotReady
from schemas.state_folder import home, private_folder

if TYPE_CHECKING:
    from infra.stack.autoscaler import Autoscaler
    from infra.stack.launcher import Stack
    from infra.terminal.stack_display import PlainLines

_POLL_S = 0.2
_DOWN_S = 2 * GRACE_S + 20  # for gateways, then for the others, and for the broker
Count = Annotated[int, typer.Option(min=0)]


def up(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.", show_default="1")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.", show_default="1")] = None,
    replica: Annotated[
        int | None, typer.Option(help="Replica workers, which do both phases.", show_default="0")
    ] = None,
    retrieval: Annotated[int, typer.Option(help="Retrieval workers.")] = 0,
    shards: Annotated[int, typer.Option(help="Shards of the documents.")] = 1,
    embedding: Annotated[
        int | None,
        typer.Option(help="Embedding workers.", show_default="1 beside retrieval workers"),
    ] = None,
    routers: Annotated[int, typer.Option(help="Routers.")] = 1,
    gateways: Annotated[int, typer.Option(help="Gateways, on ports from --port upwards.")] = 1,
    bridges: Annotated[int, typer.Option(help="Bridges, which answer prompts on topics.")] = 1,
    engine: Engine = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model: a folder, Hugging Face name, smollm2-135m-instruct or tiny. Repeat it for "
            "several models, each with these numbers of workers.",
            show_default="smollm2-135m-instruct; with --engine sim `sim`, which says words",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit to download of a Hugging Face model.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the gateway.", show_default="8000")
    ] = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Start, drain and move workers as the load changes.")
    ] = False,
    workers_max: Annotated[
        int | None,
        typer.Option(min=1, help="Most LLM workers with --autoscale.", show_default="8"),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when ready.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live table.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a line of JSON per change; with -d, the stack's state."),
    ] = False,
) -> None:
    """Start a deployment on this machine.

    Start broker, routers, workers, gateways and bridges; Ctrl-C drains and stops them.

    Examples: `trivium up --engine sim --prefill 2`, `trivium up --replica 1 -d`,
    `trivium up --retrieval 4 --shards 2`, `trivium up --autoscale --workers-max 6`,
    `trivium up --model ./small --model ./large --replica 1`,
    `trivium up --bootstrap kafka:9092`, `trivium up -d --json | jq -r .gateways[0]`
    """
    from infra.stack.launcher import Stack
    from infra.stack.plan import StackPlan
    from infra.terminal.stack_display import JsonLines, LiveTable, PlainLines

    paths = model or []
    if len(paths) > 1 and revision is not None:
        raise ConfigError("--revision: expected with one --model; set it in tables [[models]]")
    settings = settings_from(
        config,
        bootstrap,
        models=paths if len(paths) > 1 else (),
        worker={"engine": engine},
        model={"path": paths[0] if len(paths) == 1 else None, "revision": revision},
        gateway={"port": port},
        scaling={"workers_max": workers_max},
    )
    os.umask(PRIVATE)
    if detach:
        _detach(as_json)
        return
    embedding = min(1, retrieval) if embedding is None else embedding
    pools = settings.embedding.pools if embedding else ()
    plan = StackPlan(
        retrieval=retrieval,
        shards=shards,
        embedding=embedding,
        embedders=tuple(pool.public_name for pool in pools for _ in range(pool.workers)),
        routers=routers,
        gateways=gateways,
        bridges=bridges,
        broker=bootstrap is None and not names_broker(settings),
        seats=settings.scaling.workers_max if autoscale else 0,
    ).for_models(settings.worker_counts({"prefill": prefill, "decode": decode, "replica": replica}))
    stack = Stack(settings, plan)
    scaler = _scaler(stack) if autoscale else None
    lines = PlainLines if plain or not sys.stdout.isatty() else LiveTable
    asyncio.run(_run(stack, JsonLines(stack) if as_json else lines(stack), scaler))


def down(quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Stop the deployment, draining it first.

    Example: `TRIVIUM_HOME=/tmp/other trivium down`
    """
    state = read_state()
    if state is not None:
        state.launcher.signal(signal.SIGTERM)
        if not state.launcher.wait(_DOWN_S):
            state.launcher.stop(grace_s=5)
    if as_json:
        print_json({"stopped": state is not None})
    elif not quiet:
        print("stopped" if state else f"nothing runs in {home()}")


def _scaler(stack: "Stack") -> "Autoscaler":
    from infra.stack.autoscaler import Autoscaler

    return Autoscaler(stack)


async def _run(stack: "Stack", display: "PlainLines", scaler: "Autoscaler | None" = None) -> None:
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    with display:
        showing = asyncio.create_task(display.follow())
        try:
            if await _unless(stop, stack.start()):
                display.ready()
                await _until(stop, scaler)
        finally:
            if stop.is_set():
                display.stopping()
            if not await _unless(hurry, stack.stop()):
                await stack.stop(grace_s=0)
            showing.cancel()
    display.stopped()


async def _until(stop: asyncio.Event, scaler: "Autoscaler | None") -> None:
    """Wait for the stop event, and scale the stack meanwhile."""
    if scaler is None:
        await stop.wait()
    else:
        await _unless(stop, scaler.run())


async def _unless(event: asyncio.Event, work: Any) -> bool:
    """Do the work, unless the event comes first; return whether the work was done."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        return False
    task.result()
    return True


def _detach(as_json: bool) -> None:
    if (running := read_state()) is not None:
        raise NotReady(f"a stack runs already, at {running.bootstrap}; stop it with `trivium down`")
    arguments = [arg for arg in sys.argv[1:] if arg not in ("-d", "--detach", "--json")]
    private_folder(home())
    log_file = private_folder(home() / "logs") / "up.log"
    with log_file.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "infra.cli.app", *arguments, "--plain"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=PRIVATE,
        )
    printed_names: set[str] = set()
    while True:
        state = read_state()
        if state is not None and state.launcher.pid == child.pid:
            if not as_json:
                _show_new(state, printed_names)
            if state.ready and as_json:
                print_json(asdict(state))
                return
            if state.ready:
                print(f"ready: {', '.join(state.gateways)}; logs in {home() / 'logs'}")
                return
        if child.poll() is not None:
            raise NotReady(f"the stack did not start:\n{log_file.read_text().strip()}")
        time.sleep(_POLL_S)


def _show_new(state: StackState, printed_names: set[str]) -> None:
    if state.waits_for and state.waits_for not in printed_names:
        printed_names.add(state.waits_for)
        print(f"waiting: {state.waits_for}", flush=True)
    for row in state.processes:
        if row.state == "ready" and row.name not in printed_names:
            printed_names.add(row.name)
            print(f"{row.name} is ready, pid {row.pid}")
