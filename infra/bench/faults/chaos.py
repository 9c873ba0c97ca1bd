"""The chaos run: a real stack whose processes are killed and frozen while clients talk to it.

`make bench-chaos`, or `trivium bench chaos --quick`. Every 2 to 5 s a process drawn from
the seed is killed or frozen, the broker every 30 s, once for 60 s. Half of the clients are `openai`
as it comes, half resume. Then the log is audited, and each answer compared with what one engine
alone says. Writes build/bench/chaos.json.
"""

import asyncio
import random
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from infra.bench.benchmark import Benchmark, Findings, offered
from infra.bench.faults.chaos_figures import ChaosRun, bars, figures, show
from infra.bench.faults.conversation_load import Client, Talks
from infra.bench.faults.expected_answers import alone
from infra.bench.faults.http_clients import Plain, Resuming
from infra.bench.faults.kill_schedule import Killer, draw
from infra.bench.faults.log_audit import read_audit, settled
from infra.bench.faults.target_stack import MODEL, SIM, make_stack, urls
from infra.bench.results import BENCH_DIR
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

PLAN = StackPlan(prefill=2, decode=2, replica=1, routers=2, gateways=2)
BACK_S = 120.0  # for every process to be back
DRAIN_S = 300.0  # for the last answers to end
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long, how many, and which draws."""

    seconds: float = offered(600.0, "of killing")
    streams: int = offered(30, "clients, half of them plain")
    broker_every_s: float = offered(30.0, "s; 0: never")
    broker_away_s: float = offered(60.0, "s, once")
    seed: int = offered(1)


async def run(options: Options, console: Console) -> Findings:
    """The whole run."""
    folder = BENCH_DIR.absolute() / "chaos"
    stack = make_stack(PLAN, folder)
    console.print(f"Starting {len(PLAN.names())} processes and a broker in {folder} ...")
    try:
        await stack.start()
        seen_run = await _hurt(stack, options, console)
        console.print("Reading the log, and asking one engine alone ...")
        await settled(stack.settings.log)
        seen_run.audit = await read_audit(stack.settings.log)
        seen_run.expected = await alone(stack.settings, seen_run.audit.requests.values())
    finally:
        await stack.stop(grace_s=10)
    show(seen_run, console)
    return Findings(
        figures=figures(seen_run),
        bars=bars(seen_run),
        load={"plan": asdict(PLAN), "sim": SIM},
        beside=f"; the processes' logs are in {folder / 'logs'}",
    )


async def _hurt(stack: Stack, options: Options, console: Console) -> ChaosRun:
    talks, killer = Talks(_clients(stack, options), options.seed), Killer(stack)
    blows = draw(
        list(PLAN.names()),
        seconds=options.seconds,
        broker_every_s=options.broker_every_s,
        broker_away_s=options.broker_away_s,
        rng=random.Random(options.seed),
    )
    talking, killing = asyncio.create_task(talks.run()), asyncio.create_task(killer.follow(blows))
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=options.seconds)
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < options.seconds:
            progress.update(bar, completed=passed_s, description=_line(talks, killer, stack))
            await asyncio.sleep(_LOOK_S)
        await killing
        talks.is_over = True
        healed_s = time.monotonic()
        states = await _back(stack)
        back_s = time.monotonic() - healed_s
        await asyncio.wait([talking], timeout=DRAIN_S)
        progress.update(bar, completed=options.seconds, description=_line(talks, killer, stack))
    talking.cancel()
    await asyncio.gather(talking, return_exceptions=True)
    restarts = {name: process.restarts for name, process in stack.processes.items()}
    return ChaosRun(
        talks=talks,
        dealt=killer.dealt,
        missed=killer.missed,
        states=states,
        back_s=back_s,
        restarts=restarts,
    )


def _clients(stack: Stack, options: Options) -> list[Client]:
    clients: list[Client] = []
    for number in range(options.streams):
        kind = Resuming if number % 2 else Plain
        clients.append(kind(urls(stack), MODEL, random.Random(f"{options.seed}-{number}")))
    return clients


async def _back(stack: Stack) -> dict[str, str]:
    """The state of every process once all are back or given up, or time is up."""
    end_s = time.monotonic() + BACK_S
    while True:
        states = {name: stack.state_of(name) for name in stack.processes}
        if time.monotonic() > end_s or not set(states.values()) - {"ready", "failed"}:
            return states
        await asyncio.sleep(_LOOK_S)


def _line(talks: Talks, killer: Killer, stack: Stack) -> str:
    ready = sum(stack.state_of(name) == "ready" for name in stack.processes)
    return (
        f"{sum(killer.dealt.values())} blows, {ready}/{len(stack.processes)} ready, "
        f"{len(talks.seen)} answers, {talks.under_way} under way"
    )


BENCHMARK = Benchmark(
    name="chaos",
    about=__doc__,
    run=run,
    full=Options(),
    quick=Options(seconds=75.0, broker_every_s=25.0, broker_away_s=15.0),
    quick_said="75 s, the broker every 25 s",
)
