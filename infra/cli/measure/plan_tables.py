"""Implements `trivium plan`: measures tables that policies look up, and plans sizes of pools."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.measure import plan_pools
from infra.cli.options import Bootstrap, Config, Seed, in_panel, settings_of_running
from infra.stack.statefile import read_state
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.planning.live_conversations import LiveLoad
    from schemas.settings import LogSettings
    from streams.core.placement.ppd_table import PpdTable

app = typer.Typer(help="Plan sizes of pools, and policy `table`.")
app.command("pools", epilog=plan_pools.EXAMPLES)(plan_pools.pools)
_LIVE = in_panel("On a cluster")
_FOLDER = Path("build/plan")
_EXAMPLES = """[bold]Examples[/]

trivium plan ppd --prefill 1 --decode 3 [dim]in the simulator[/]

trivium plan ppd --engine sim --quick [dim]on a cluster that starts and ends here[/]

trivium plan ppd --probe, then `trivium up` with router.policy = "table" and router.table =
"build/plan/probe.json", then trivium plan ppd --live [dim]on the cluster that runs here[/]

trivium plan ppd --live --streams 1 --streams 4 --streams 16 [dim]at three loads[/]

trivium plan ppd --url http://HOST:8000 --bootstrap HOST:9092 [dim]on a cluster elsewhere[/]
"""


@app.callback()
def _group() -> None:
    """Plan sizes of pools, and policy `table`."""


@app.command("ppd", epilog=_EXAMPLES)
def ppd(
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Write the table that a cluster needs while it is measured."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The table's file.", show_default="build/plan/ppd.json, or probe.json"),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Measure three loads instead of ten, or two kinds of turns."),
    ] = False,
    seed: Seed = 1,
    jobs: Annotated[
        int, typer.Option(help="Number of processes.", show_default="one per core")
    ] = 0,
    live: Annotated[bool, _LIVE("--live", help="Measure the cluster that runs here.")] = False,
    url: Annotated[
        str | None, _LIVE(help="Measure a cluster by the address of its gateway.")
    ] = None,
    engine: Annotated[
        str | None, _LIVE(help="Start a cluster here to measure: sim or vllm.")
    ] = None,
    conversations: Annotated[int, _LIVE(min=1, help="Conversations per kind, load and x.")] = 20,
    streams: Annotated[
        list[int] | None,
        _LIVE(
            min=1,
            help="Conversations at a time: a load of the table; may be repeated.",
            show_default="2 and 8, with --quick 2",
        ),
    ] = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Measure PPD's table for the policy `table`: each kind of turn with x=0 and x=1.

    It is measured in the simulator, or on a cluster through its gateway, with the load from the
    cluster's log. While a cluster is measured, its routers need the table of --probe, whose weights
    choose local or remote. Then start routers with `policy = "table"` and `table = "FILE"` in the
    section router.
    """
    from infra.planning import live_table

    out = out or _FOLDER / ("probe.json" if probe else "ppd.json")
    if probe:
        live_table.write(live_table.PROBE, out)
        print(f'written: {out}; start routers with policy = "table" and table = "{out}"')
        return
    if live or url or engine:
        loads = live_table.kinds(
            conversations=conversations, streams=streams or (), seed=seed, quick=quick
        )
        if engine is not None:
            table = _measure_new(engine, loads, prefill, decode)
        else:
            table = _measure_running(
                url or _here(), settings_of_running(config, bootstrap).log, loads
            )
    else:
        table = _simulated(prefill, decode, quick, seed, jobs)
    live_table.write(table, out)
    print(f"written: {out} ({len(table.cells)} cells)")


def _simulated(prefill: int, decode: int, quick: bool, seed: int, jobs: int) -> "PpdTable":
    from infra.planning.grid import LOADS_PER_S
    from infra.planning.plan_table import plan
    from infra.planning.runs import runner
    from infra.simulator.shape import ClusterShape

    loads = LOADS_PER_S[1::4] if quick else LOADS_PER_S
    with runner(jobs) as pool:
        return plan(pool, ClusterShape(prefill=prefill, decode=decode).name, loads, seed)


@contextmanager
def _bar(loads: "list[LiveLoad]") -> Iterator[Callable[[], None]]:
    """Show how many runs are done; yield a function that counts one more."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task("x=0 and x=1", total=2 * len(loads))
        yield lambda: bars.advance(bar)


def _measure_running(url: str, log: "LogSettings", loads: "list[LiveLoad]") -> "PpdTable":
    from infra.planning import live_table

    with _bar(loads) as advance:
        return asyncio.run(live_table.measure(url, log, loads, advance))


def _here() -> str:
    state = read_state()
    if state is None or not state.gateways:
        raise ConfigError(
            "plan: expected a cluster that runs here, found none; start one with `trivium up`, "
            "name a gateway with --url, or have one started with --engine sim"
        )
    return state.gateways[0]


def _measure_new(engine: str, loads: "list[LiveLoad]", prefill: int, decode: int) -> "PpdTable":
    from infra.bench.results import BENCH_DIR
    from infra.planning import live_stack, live_table
    from infra.stack.plan import StackPlan

    if engine not in ("sim", "vllm"):
        raise ConfigError(f"--engine: expected sim or vllm, found {engine!r}")

    async def run(advance: Callable[[], None]) -> "PpdTable":
        folder = BENCH_DIR.absolute() / "plan"
        with live_stack.machine(engine, folder) as make_stack:
            live_table.write(live_table.PROBE, folder / "probe.json")
            deployment = live_stack.DEPLOYMENTS[engine][0]
            stack = make_stack(deployment, StackPlan(prefill=prefill, decode=decode, broker=False))
            stack.settings = live_table.with_probe_table(stack.settings, folder / "probe.json")
            async with stack:
                url, log = stack.gateway_urls[0], stack.settings.log
                return await live_table.measure(url, log, loads, advance)

    with _bar(loads) as advance:
        return asyncio.run(run(advance))
