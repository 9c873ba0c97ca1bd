"""Kills processes and brokers under load; `checker.py` then reads the log and what clients saw.

`make chaos`, or `trivium bench chaos --quick`: conversations arrive at 30 requests/s, some with
passages, some with a client that disconnects. Every 5 s a process drawn from the seed gets SIGKILL,
SIGSTOP or SIGTERM, and the broker dies three times. With `--hostile` all of this runs twice: alone,
and then beside a tenant whose calls once made Trivium unusable for all others; the first tenant
also makes other calls (`Errands`). Writes build/bench/chaos.json; the history is in
build/bench/chaos.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.faults import verdict
from infra.bench.faults.conversations import COLLECTION, ConversationLoad, texts
from infra.bench.faults.history import FaultHistory, stalls_in
from infra.bench.faults.http_clients import WHOLE, ClientAnswer, Resuming
from infra.bench.faults.kill_schedule import BROKER, KILL, STOP, FaultInjector, draw
from infra.bench.faults.log_audit import wait_settled
from infra.bench.results import BENCH_DIR, Bar, at_most, nested, percentiles, ratio, table
from infra.bench.stacks import MODEL, SIM, make_stack, running, urls
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


@asynccontextmanager
async def judged(
    stack: Stack, seed: int, findings: dict[str, Any], key: str = ""
) -> AsyncIterator[FaultHistory]:
    """Run the stack with the documents of conversations, and yield a history to write. When the
    block ends, add what the checker finds in it and on the log, for the tenant of `key` if given.
    """
    path = stack.folder / "history.jsonl"
    async with running(stack):
        await put_documents(stack, seed)
        with closing(FaultHistory(path)) as history:
            yield history
        await wait_settled(stack.settings.log)
        task = verdict.history_task(stack.settings, path, key)
        findings |= await verdict.run_checker(task, stack.folder)
        findings["stalls"] = stalls_in(path)


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


async def run(options: ChaosOptions, console: Console) -> BenchmarkResult:
    """Run the load under faults and return figures, bars and tables."""
    folder = BENCH_DIR.absolute() / "chaos"
    plan = replace(PLAN, bridges=1) if options.hostile else PLAN
    key = KEYS[0] if options.hostile else ""
    stack = make_stack(plan, folder)
    if options.hostile:
        gateway = replace(stack.settings.gateway, api_keys=KEYS)
        model = replace(stack.settings.model, max_model_len=LONG_TOKENS_MAX)
        stack.settings = replace(stack.settings, gateway=gateway, model=model)
    console.print(f"Starting {len(plan.names())} processes and a broker in {folder} ...")
    findings: dict[str, Any] = {}
    async with judged(stack, options.seed, findings, key) as history:
        rounds = [await _round(stack, history, options, key, nullcontext({}))]
        if options.hostile:
            hostile_tenant = hostile(urls(stack), KEYS[1], options.seed)
            rounds.append(await _round(stack, history, options, key, hostile_tenant))
        console.print("Reading the log and the history ...")
    for line in verdict.examples(findings):
        console.print(line, markup=False, soft_wrap=True)
    last = rounds[-1]
    alone = {"alone": rounds[0]} if options.hostile else {}
    tables = [
        table("Blows", _by_process(last)),
        table("Stalls of answers by what was hurt", findings["stalls"]),
    ]
    if options.hostile:
        seconds = {"alone": rounds[0]["seconds"], "beside a hostile tenant": last["seconds"]}
        tables.append(table("Times of the first tenant, s", nested(seconds)))
    return BenchmarkResult(
        figures={**findings, **last, **alone},
        bars=[
            *verdict.bars(findings),
            at_most("answers that never ended", sum(row["never_ended"] for row in rounds), 0),
            at_most("processes not back", len(last["not_back"]), 0),
            *(_fairness(*rounds) if options.hostile else ()),
        ],
        tables=tables,
        load={"plan": asdict(plan), "sim": SIM},
        beside=f"; what clients saw and the processes' logs are in {folder}",
    )


async def _round(
    stack: Stack,
    history: FaultHistory,
    options: ChaosOptions,
    key: str,
    beside: AbstractAsyncContextManager[dict[str, int]],
) -> dict[str, Any]:
    """Run the load under faults and return the figures. `beside` yields counts of misdeeds."""
    answer_s, seed = list[float](), options.seed
    restarts = {name: process.restarts for name, process in stack.processes.items()}

    def on_answer(answer: ClientAnswer) -> None:
        history.record_answer(answer)
        if answer.status == WHOLE:
            answer_s.append(answer.ended_s - answer.asked_s)

    client = Resuming(urls(stack), MODEL, random.Random(seed), key)
    load = ConversationLoad(client, rate=options.rate, seed=seed, on_answer=on_answer)
    errands = Errands(urls(stack), key, seed)
    injector = FaultInjector(stack, history.record_fault)
    faults = draw(
        list(stack.plan.names()), seconds=options.seconds, every_s=options.every_s,
        broker_kills=options.broker_kills, rng=random.Random(seed),
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:  # an aborted run leaves no process frozen
        watching = group.create_task(note_broker(stack, history))
        if options.hostile:
            group.create_task(errands.run())
        asking, killing = group.create_task(load.run()), group.create_task(injector.follow(faults))
        async with beside as misdeeds:
            progress, began_s = counting("", options.seconds), time.monotonic()
            while (passed_s := time.monotonic() - began_s) < options.seconds and not asking.done():
                progress(completed=int(passed_s), description=_line(load, injector, stack))
                await asyncio.sleep(_LOOK_S)
        load.is_over = errands.is_over = True
        await asking
        await killing
        healed_s = time.monotonic()
        states = await _back(stack)
        back_s = time.monotonic() - healed_s
        watching.cancel()
    restarts = {
        name: process.restarts - restarts[name] for name, process in stack.processes.items()
    }
    blows = injector.fault_counts
    own_exits = {name: count - blows[name, KILL] - blows[name, STOP]  # leases lost, or defects
                 for name, count in restarts.items()}  # fmt: skip
    return {
        "seconds": {
            name: {"count": len(some), **percentiles(some), "max": max(some, default=None)}
            for name, some in {"answers": answer_s, **errands.seconds}.items()
        },
        "errands_failed": errands.failed,
        "misdeeds": misdeeds,
        "blows": {f"{name} {how}": count for (name, how), count in sorted(blows.items())},
        "blows_missed": injector.skipped_faults,
        "restarts": restarts,
        "ended_by_themselves": {name: count for name, count in own_exits.items() if count},
        "not_asked": load.left_out,
        "never_ended": await load.drain(DRAIN_S),
        "back_s": round(back_s, 1),
        "not_back": {name: state for name, state in states.items() if state != "ready"},
    }


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


def _fairness(alone: dict[str, Any], beside: dict[str, Any]) -> list[Bar]:
    """Return bars: the first tenant's errands succeed, and its answers are hardly slower."""
    failed = [*alone["errands_failed"], *beside["errands_failed"]]
    before, after = (row["seconds"]["answers"]["p99"] for row in (alone, beside))
    label = "answers beside a hostile tenant over alone, p99"
    return [
        at_most("errands that were not done", len(failed), 0),
        at_most(label, ratio(after, before), SLOWER_MAX, "times"),
    ]


def _by_process(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return rows for a table: the blows, own exits and state of each process."""
    rows: dict[str, Counter[str]] = {name: Counter() for name in figures["restarts"]}
    for blow, count in figures["blows"].items():
        name, how = blow.rsplit(" ", 1)
        rows.setdefault(name, Counter())[how] = count
    hows = sorted({how for row in rows.values() for how in row})
    return {
        name: {how: row[how] or "" for how in hows}
        | {"ended by itself": figures["ended_by_themselves"].get(name, "")}
        | {"now": figures["not_back"].get(name, "ready")}
        for name, row in rows.items()
    }


BENCHMARK = Benchmark(
    "chaos", __doc__, run, full=ChaosOptions(),
    quick=ChaosOptions(seconds=90.0, rate=15.0, broker_kills=1),
    quick_help="90 s at 15 requests/s, the broker once",
)  # fmt: skip
