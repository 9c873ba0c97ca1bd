"""Processes and the broker die under load, and a program of its own judges what clients saw.

`make chaos`, or `trivium bench chaos --quick`. Conversations arrive at 30 requests/s, some with
passages, some hung up on. Every 5 s a process drawn from the seed gets SIGKILL, SIGSTOP or SIGTERM,
and the broker dies three times. `checker.py` reads what clients wrote down and the raw topics.
With `--hostile` all of that is done twice: alone, and then beside a tenant who sends what once took
Trivium from all others; the first tenant does errands besides. Writes build/bench/chaos.json; the
history stays beside it, in build/bench/chaos.
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

from infra.bench.benchmark import Benchmark, Findings, offered
from infra.bench.faults import judging
from infra.bench.faults.conversation_load import COLLECTION, Load, texts
from infra.bench.faults.history import History
from infra.bench.faults.http_clients import WHOLE, Resuming, Seen
from infra.bench.faults.kill_schedule import BROKER, KILL, STOP, Killer, draw
from infra.bench.faults.log_audit import settled
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
BACK_S = 120.0  # for every process to be back
DRAIN_S = 320.0  # for the last answers to end: longer than a client is patient
FOUND_S = 120.0  # for documents to be found
SLOWER_MAX = 1.5  # p99 of a tenant's answers beside a hostile one, over that alone
KEYS = ("first-tenant", "hostile-tenant")
LONG_TOKENS_MAX = 16_384  # of a prompt and its answer, where a tenant sends long ones
_LOOK_S = 0.25
_JOINS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long, how much, and which draws."""

    seconds: float = offered(600.0, "of killing")
    rate: float = offered(30.0, "requests/s")
    every_s: float = offered(5.0, "between two blows")
    broker_kills: int = offered(3, "times that the broker dies")
    hostile: int = offered(0, "1: once more, beside a hostile tenant")
    seed: int = offered(1)


@dataclass(slots=True, kw_only=True)
class Run:
    """What was done, and what became of it."""

    dealt: Counter[tuple[str, str]]
    missed: int
    left_out: int  # questions that were not asked: too many were under way
    never_ended: int
    back_s: float  # until all processes were ready after the last blow
    states: dict[str, str]
    restarts: dict[str, int]
    answer_s: list[float]  # of each whole answer
    errands: Errands | None
    misdeeds: dict[str, int]

    def away(self) -> dict[str, str]:
        """Processes that did not come back."""
        return {name: state for name, state in self.states.items() if state != "ready"}

    def own_ends(self) -> dict[str, int]:
        """Ends of processes that nobody ended: of leases lost while frozen, or of a mistake."""
        ended = {
            name: count - self.dealt[name, KILL] - self.dealt[name, STOP]
            for name, count in self.restarts.items()
        }
        return {name: count for name, count in ended.items() if count}


async def run(options: Options, console: Console) -> Findings:
    """The whole run."""
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
        history = History(folder / "history.jsonl")
        runs = [await _hurt(stack, history, options, console, nullcontext({}))]
        if options.hostile:
            other = hostile(urls(stack), KEYS[1], options.seed)
            runs.append(await _hurt(stack, history, options, console, other))
        history.close()
        console.print("Reading the log and the history ...")
        await settled(stack.settings.log)
        task = judging.write_task(stack.settings, folder / "history.jsonl", *keys[:1])
        found = await judging.judged(task)
    finally:
        await stack.stop(grace_s=10)
    for line in judging.examples(found):
        console.print(line, markup=False, soft_wrap=True)
    return Findings(
        figures={**found, **_figures(runs[-1]), "alone": _figures(runs[0])}
        if options.hostile
        else {**found, **_figures(runs[0])},
        bars=[
            *judging.bars(found),
            at_most("answers that never ended", sum(run.never_ended for run in runs), 0, ""),
            at_most("processes not back", len(runs[-1].away()), 0, ""),
            *(_fairness(*runs) if options.hostile else ()),
        ],
        shown=[*tables(runs[-1], found), *([_beside(*runs)] if options.hostile else [])],
        load={"plan": asdict(plan), "sim": SIM},
        beside=f"; what clients saw and the processes' logs are in {folder}",
    )


async def put_documents(stack: Stack, seed: int) -> None:
    """What conversations look up; returns when it is found. While processes start, a small machine
    may cost the library its lease: then it joins again and puts the same once more."""
    for tries_left in reversed(range(_JOINS_MAX)):
        try:
            async with library(stack.settings.log) as books:
                await books.put(COLLECTION, texts(seed))
                await books.wait_for_all(COLLECTION, texts(seed), FOUND_S)
            return
        except LeaseError:
            if not tries_left:
                raise


async def _hurt(
    stack: Stack,
    history: History,
    options: Options,
    console: Console,
    beside: AbstractAsyncContextManager[dict[str, int]],
) -> Run:
    """`beside` gives how often each misdeed has ended in each way, once it is over."""
    key, answer_s = KEYS[0] if options.hostile else "", list[float]()
    restarts = {name: process.restarts for name, process in stack.processes.items()}

    def told(seen: Seen) -> None:
        history.answer(seen)
        if seen.ended == WHOLE:
            answer_s.append(seen.ended_s - seen.asked_s)

    client = Resuming(urls(stack), MODEL, random.Random(options.seed), key)
    load = Load(client, rate=options.rate, seed=options.seed, told=told)
    errands = Errands(urls(stack), key, options.seed) if options.hostile else None
    killer = Killer(stack, history.blow)
    blows = draw(
        list(stack.plan.names()),
        seconds=options.seconds,
        every_s=options.every_s,
        broker_kills=options.broker_kills,
        rng=random.Random(options.seed),
    )
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    async with asyncio.TaskGroup() as group:  # a run that is ended freezes nobody any more
        watching = group.create_task(note_broker(stack, history))
        if errands is not None:
            group.create_task(errands.run())
        asking, killing = group.create_task(load.run()), group.create_task(killer.follow(blows))
        async with beside as misdeeds:
            with Progress(*columns, console=console) as progress:
                bar = progress.add_task("", total=options.seconds)
                end_s = time.monotonic() + options.seconds
                while (left_s := end_s - time.monotonic()) > 0 and not asking.done():
                    done_s = options.seconds - left_s
                    progress.update(bar, completed=done_s, description=_line(load, killer, stack))
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
    return Run(
        dealt=killer.dealt,
        missed=killer.missed,
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


async def note_broker(stack: Stack, history: History) -> None:
    """Write down when it answers again, until cancelled."""
    was_there = True
    while True:
        is_there = await asyncio.to_thread(broker_answers, stack.bootstrap)
        if is_there and not was_there:
            history.back(BROKER)
        was_there = is_there
        await asyncio.sleep(_LOOK_S)


async def _back(stack: Stack) -> dict[str, str]:
    """The state of every process once all are back or given up, or time is up."""
    end_s = time.monotonic() + BACK_S
    while True:
        states = {name: stack.state_of(name) for name in stack.processes}
        if time.monotonic() > end_s or not set(states.values()) - {"ready", "failed"}:
            return states
        await asyncio.sleep(_LOOK_S)


def _line(load: Load, killer: Killer, stack: Stack) -> str:
    ready = sum(stack.state_of(name) == "ready" for name in stack.processes)
    return (
        f"{sum(killer.dealt.values())} blows, {ready}/{len(stack.processes)} ready, "
        f"{load.ended.total()} answers, {load.under_way} under way"
    )


def _fairness(alone: Run, beside: Run) -> list[Bar]:
    """All that the first tenant asked is done, and not much later than without the other one."""
    failed = [each for run in (alone, beside) if run.errands for each in run.errands.failed]
    before, after = (percentiles(run.answer_s)["p99"] for run in (alone, beside))
    slower = after / before if before and after else None
    return [
        at_most("errands that were not done", len(failed), 0, ""),
        at_most("answers beside a hostile tenant over alone, p99", slower, SLOWER_MAX, "times"),
    ]


def _beside(alone: Run, beside: Run) -> Table:
    """How long what the first tenant asked took."""
    heads = ("count", "p50, s", "p99, s", "longest, s")
    title = "The first tenant, alone and beside a hostile one"
    shown = Table("what", *heads, *heads, title=title)
    rows = [_durations(run) for run in (alone, beside)]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [value for row in rows for value in row.get(name, dict.fromkeys(heads)).values()]
        shown.add_row(name, *(number(value) for value in values))
    return shown


def _durations(hurt: Run) -> dict[str, dict[str, float | None]]:
    """Of answers, and of each kind of errand."""
    errands = hurt.errands.seconds if hurt.errands else {}
    return {
        name: {"count": len(some), **percentiles(some), "max": max(some, default=None)}
        for name, some in {"answers": hurt.answer_s, **errands}.items()
    }


def _figures(hurt: Run) -> dict[str, Any]:
    """For the report, beside what the checker found."""
    return {
        "seconds": _durations(hurt),
        "errands_failed": hurt.errands.failed if hurt.errands else [],
        "misdeeds": hurt.misdeeds,
        "blows": {f"{name} {how}": count for (name, how), count in sorted(hurt.dealt.items())},
        "blows_missed": hurt.missed,
        "restarts": hurt.restarts,
        "ended_by_themselves": hurt.own_ends(),
        "not_asked": hurt.left_out,
        "never_ended": hurt.never_ended,
        "back_s": round(hurt.back_s, 1),
        "not_back": hurt.away(),
    }


def tables(hurt: Run, found: dict[str, Any]) -> list[Table]:
    """Who was hurt, and how long that stalled answers."""
    hows = sorted({how for _, how in hurt.dealt})
    dealt = Table("process", *hows, "ended by itself", "now", title="Blows")
    for name in dict.fromkeys([*hurt.states, *(name for name, _ in hurt.dealt)]):
        counts = [*(hurt.dealt[name, how] for how in hows), hurt.own_ends().get(name, 0)]
        dealt.add_row(name, *(str(n or "") for n in counts), hurt.states.get(name, ""))
    pauses = Table("hurt", "stalls", "p50, s", "p99, s", "longest, s", title="Stalls of answers")
    for kind, row in found["stalls"].items():
        pauses.add_row(kind, *(f"{value:g}" for value in row.values()))
    return [dealt, pauses]


BENCHMARK = Benchmark(
    name="chaos",
    about=__doc__,
    run=run,
    full=Options(),
    quick=Options(seconds=90.0, rate=15.0, broker_kills=1),
    quick_said="90 s at 15 requests/s, the broker once",
)
