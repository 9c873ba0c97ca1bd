"""Kills processes and the broker under load; a separate program checks what clients received.

`make chaos`, or `trivium bench chaos --quick`. Conversations arrive at 30 requests/s, some with
passages, some with a client that disconnects. Every 5 s a process drawn from the seed gets SIGKILL,
SIGSTOP or SIGTERM, and the broker dies three times. `checker.py` reads the history that clients
wrote and the raw topics. With `--hostile` all of this runs twice: alone, and then beside a tenant
whose calls once made Trivium unusable for all others; the first tenant also makes other calls
(`Errands`). Writes build/bench/chaos.json; the history is in build/bench/chaos.
"""

import asyncio
import random
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.faults import verdict
from infra.bench.faults.conversation_load import COLLECTION, ConversationLoad, texts
from infra.bench.faults.history import FaultHistory
from infra.bench.faults.http_clients import WHOLE, ClientAnswer, Resuming
from infra.bench.faults.kill_schedule import BROKER, KILL, STOP, FaultInjector, draw
from infra.bench.faults.log_audit import wait_settled
from infra.bench.faults.target_stack import MODEL, SIM, make_stack, urls
from infra.bench.results import BENCH_DIR, Bar, at_most, number, percentiles
from infra.bench.tenants.errands import Errands
from infra.bench.tenants.hostile import hostile
from infra.broker.probe import broker_answers
from infra.handbook.library import library
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import LeaseError

PLAN = StackPlan(prefill=2, decode=3, retrieval=2, embedding=1, routers=2, gateways=2)
BACK_S = 120.0  # timeout until every process is ready again
DRAIN_S = 320.0  # timeout of the last answers; longer than the patience of a client
FOUND_S = 120.0  # timeout until searches find the documents
SLOWER_MAX = 1.5  # p99 of a tenant's answers beside a hostile tenant, over its p99 alone
KEYS = ("first-tenant", "hostile-tenant")
LONG_TOKENS_MAX = 16_384  # of a prompt and its answer, since the hostile tenant sends long ones
_LOOK_S = 0.25
_JOINS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Sets the duration, the load, the faults and the seed."""

    seconds: float = option(600.0, "of killing")
    rate: float = option(30.0, "requests/s")
    every_s: float = option(5.0, "between two blows")
    broker_kills: int = option(3, "times that the broker dies")
    hostile: int = option(0, "1: once more, beside a hostile tenant")
    seed: int = option(1)


@dataclass(slots=True, kw_only=True)
class ChaosRun:
    """The injected faults of one run, and their effects."""

    fault_counts: Counter[tuple[str, str]]
    skipped_faults: int
    left_out: int  # questions that were skipped, as too many calls were in flight
    never_ended: int
    back_s: float  # from the last fault until all processes were ready
    states: dict[str, str]
    restarts: dict[str, int]
    answer_s: list[float]  # of each whole answer
    errands: Errands | None
    misdeeds: dict[str, int]

    def unready_processes(self) -> dict[str, str]:
        """Return the processes that are not ready, with their states."""
        return {name: state for name, state in self.states.items() if state != "ready"}

    def own_exits(self) -> dict[str, int]:
        """Return counts of exits without KILL or STOP: leases lost while frozen, or defects."""
        exit_counts = {
            name: count - self.fault_counts[name, KILL] - self.fault_counts[name, STOP]
            for name, count in self.restarts.items()
        }
        return {name: count for name, count in exit_counts.items() if count}


async def run(options: ChaosOptions, console: Console) -> BenchmarkResult:
    """Run the load under faults and return figures, bars and tables."""
    folder = BENCH_DIR.absolute() / "chaos"
    plan = replace(PLAN, bridges=1) if options.hostile else PLAN
    keys = KEYS if options.hostile else ()
    stack = make_stack(plan, folder)
    if options.hostile:
        gateway = replace(stack.settings.gateway, api_keys=KEYS)
        model = replace(stack.settings.model, max_model_len=LONG_TOKENS_MAX)
        stack.settings = replace(stack.settings, gateway=gateway, model=model)
    console.print(f"Starting {len(plan.names())} processes and a broker in {folder} ...")
    try:
        await stack.start()
        await put_documents(stack, options.seed)
        history = FaultHistory(folder / "history.jsonl")
        runs = [await _run_under_faults(stack, history, options, console, nullcontext({}))]
        if options.hostile:
            hostile_tenant = hostile(urls(stack), KEYS[1], options.seed)
            runs.append(await _run_under_faults(stack, history, options, console, hostile_tenant))
        history.close()
        console.print("Reading the log and the history ...")
        await wait_settled(stack.settings.log)
        task = verdict.write_task(stack.settings, folder / "history.jsonl", *keys[:1])
        findings = await verdict.run_checker(task)
    finally:
        await stack.stop(grace_s=10)
    for line in verdict.examples(findings):
        console.print(line, markup=False, soft_wrap=True)
    return BenchmarkResult(
        figures={**findings, **_figures(runs[-1]), "alone": _figures(runs[0])}
        if options.hostile
        else {**findings, **_figures(runs[0])},
        bars=[
            *verdict.bars(findings),
            at_most("answers that never ended", sum(run.never_ended for run in runs), 0, ""),
            at_most("processes not back", len(runs[-1].unready_processes()), 0, ""),
            *(_fairness(*runs) if options.hostile else ()),
        ],
        tables=[*tables(runs[-1], findings), *([_beside(*runs)] if options.hostile else [])],
        load={"plan": asdict(plan), "sim": SIM},
        beside=f"; what clients saw and the processes' logs are in {folder}",
    )


async def put_documents(stack: Stack, seed: int) -> None:
    """Put the documents that conversations search, and wait until searches find them. On a small
    machine the library may lose its lease while processes start: then it joins and puts again."""
    for tries_left in reversed(range(_JOINS_MAX)):
        try:
            async with library(stack.settings.log) as books:
                await books.put(COLLECTION, texts(seed))
                await books.wait_for_all(COLLECTION, texts(seed), FOUND_S)
            return
        except LeaseError:
            if not tries_left:
                raise


async def _run_under_faults(
    stack: Stack,
    history: FaultHistory,
    options: ChaosOptions,
    console: Console,
    beside: AbstractAsyncContextManager[dict[str, int]],
) -> ChaosRun:
    """Run the load under faults. `beside` yields counts of misdeeds by kind and end."""
    key, answer_s = KEYS[0] if options.hostile else "", list[float]()
    restarts = {name: process.restarts for name, process in stack.processes.items()}

    def on_answer(answer: ClientAnswer) -> None:
        history.record_answer(answer)
        if answer.status == WHOLE:
            answer_s.append(answer.ended_s - answer.asked_s)

    client = Resuming(urls(stack), MODEL, random.Random(options.seed), key)
    load = ConversationLoad(client, rate=options.rate, seed=options.seed, on_answer=on_answer)
    errands = Errands(urls(stack), key, options.seed) if options.hostile else None
    injector = FaultInjector(stack, history.record_fault)
    faults = draw(
        list(stack.plan.names()),
        seconds=options.seconds,
        every_s=options.every_s,
        broker_kills=options.broker_kills,
        rng=random.Random(options.seed),
    )
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    async with asyncio.TaskGroup() as group:  # an aborted run leaves no process frozen
        watching = group.create_task(note_broker(stack, history))
        if errands is not None:
            group.create_task(errands.run())
        asking, killing = group.create_task(load.run()), group.create_task(injector.follow(faults))
        async with beside as misdeeds:
            with Progress(*columns, console=console) as progress:
                bar = progress.add_task("", total=options.seconds)
                end_s = time.monotonic() + options.seconds
                while (left_s := end_s - time.monotonic()) > 0 and not asking.done():
                    done_s = options.seconds - left_s
                    progress.update(bar, completed=done_s, description=_line(load, injector, stack))
                    await asyncio.sleep(_LOOK_S)
        load.is_over = True
        if errands is not None:
            errands.is_over = True
        await asking
        await killing
        healed_s = time.monotonic()
        states = await _back(stack)
        back_s = time.monotonic() - healed_s
        watching.cancel()
    return ChaosRun(
        fault_counts=injector.fault_counts,
        skipped_faults=injector.skipped_faults,
        left_out=load.left_out,
        never_ended=await load.drain(DRAIN_S),
        back_s=back_s,
        states=states,
        restarts={
            name: process.restarts - restarts[name] for name, process in stack.processes.items()
        },
        answer_s=answer_s,
        errands=errands,
        misdeeds=misdeeds,
    )


async def note_broker(stack: Stack, history: FaultHistory) -> None:
    """Record each recovery of the broker in the history, until cancelled."""
    was_there = True
    while True:
        is_there = await asyncio.to_thread(broker_answers, stack.bootstrap)
        if is_there and not was_there:
            history.record_recovery(BROKER)
        was_there = is_there
        await asyncio.sleep(_LOOK_S)


async def _back(stack: Stack) -> dict[str, str]:
    """Return the state of every process once each is ready or failed, or after `BACK_S`."""
    end_s = time.monotonic() + BACK_S
    while True:
        states = {name: stack.state_of(name) for name in stack.processes}
        if time.monotonic() > end_s or not set(states.values()) - {"ready", "failed"}:
            return states
        await asyncio.sleep(_LOOK_S)


def _line(load: ConversationLoad, injector: FaultInjector, stack: Stack) -> str:
    ready = sum(stack.state_of(name) == "ready" for name in stack.processes)
    return (
        f"{sum(injector.fault_counts.values())} blows, {ready}/{len(stack.processes)} ready, "
        f"{load.status_counts.total()} answers, {load.under_way} under way"
    )


def _fairness(alone: ChaosRun, beside: ChaosRun) -> list[Bar]:
    """Return bars: the first tenant's errands succeed, and its answers are hardly slower."""
    failed = [failure for run in (alone, beside) if run.errands for failure in run.errands.failed]
    before, after = (percentiles(run.answer_s)["p99"] for run in (alone, beside))
    slower = after / before if before and after else None
    return [
        at_most("errands that were not done", len(failed), 0, ""),
        at_most("answers beside a hostile tenant over alone, p99", slower, SLOWER_MAX, "times"),
    ]


def _beside(alone: ChaosRun, beside: ChaosRun) -> Table:
    """Return a table of the first tenant's durations, alone and beside the hostile tenant."""
    heads = ("count", "p50, s", "p99, s", "longest, s")
    title = "The first tenant, alone and beside a hostile one"
    table = Table("what", *heads, *heads, title=title)
    rows = [_durations(run) for run in (alone, beside)]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [value for row in rows for value in row.get(name, dict.fromkeys(heads)).values()]
        table.add_row(name, *(number(value) for value in values))
    return table


def _durations(result: ChaosRun) -> dict[str, dict[str, float | None]]:
    """Return percentiles of answer times and of each kind of errand."""
    errands = result.errands.seconds if result.errands else {}
    return {
        name: {"count": len(some), **percentiles(some), "max": max(some, default=None)}
        for name, some in {"answers": result.answer_s, **errands}.items()
    }


def _figures(result: ChaosRun) -> dict[str, Any]:
    """Return the figures of one run, which the report adds to the checker's findings."""
    return {
        "seconds": _durations(result),
        "errands_failed": result.errands.failed if result.errands else [],
        "misdeeds": result.misdeeds,
        "blows": {
            f"{name} {how}": count for (name, how), count in sorted(result.fault_counts.items())
        },
        "blows_missed": result.skipped_faults,
        "restarts": result.restarts,
        "ended_by_themselves": result.own_exits(),
        "not_asked": result.left_out,
        "never_ended": result.never_ended,
        "back_s": round(result.back_s, 1),
        "not_back": result.unready_processes(),
    }


def tables(result: ChaosRun, findings: dict[str, Any]) -> list[Table]:
    """Return tables of the injected faults and of the stalls they caused."""
    hows = sorted({how for _, how in result.fault_counts})
    dealt = Table("process", *hows, "ended by itself", "now", title="Blows")
    for name in dict.fromkeys([*result.states, *(name for name, _ in result.fault_counts)]):
        counts = [
            *(result.fault_counts[name, how] for how in hows),
            result.own_exits().get(name, 0),
        ]
        dealt.add_row(name, *(str(n or "") for n in counts), result.states.get(name, ""))
    pauses = Table("hurt", "stalls", "p50, s", "p99, s", "longest, s", title="Stalls of answers")
    for kind, row in findings["stalls"].items():
        pauses.add_row(kind, *(f"{value:g}" for value in row.values()))
    return [dealt, pauses]


BENCHMARK = Benchmark(
    name="chaos",
    about=__doc__,
    run=run,
    full=ChaosOptions(),
    quick=ChaosOptions(seconds=90.0, rate=15.0, broker_kills=1),
    quick_help="90 s at 15 requests/s, the broker once",
)
