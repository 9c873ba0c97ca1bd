"""Runs Dynamo's fault tolerance protocol: 8 clients of 100 requests, a process killed after 30 s.

`make bench-kills`, or `trivium bench kills`. For each kind of process it counts how many of 800
requests fail, for clients that try once, as Dynamo's do, and for as many beside them that resume
with `Last-Event-ID`. Engines are simulated; prompts and answers have the lengths of Dynamo's tests.
Writes build/bench/kills.json, with the published figures beside ours.
"""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.faults.http_clients import WHOLE, ChatQuestion, ClientAnswer, Once, Resuming
from infra.bench.faults.kill_schedule import BROKER, KILL, FaultInjector, InjectedFault
from infra.bench.faults.target_stack import MODEL, make_stack, urls
from infra.bench.results import BENCH_DIR, Bar, at_most
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

PAIRS, PAIR = StackPlan(prefill=2, decode=2), StackPlan(prefill=1, decode=1)
STEP_MS = 8.0
PROMPT_WORDS, ANSWER_TOKENS = 100, 100


class Impatient(Resuming):
    """Waits as long for an answer as Dynamo's client, and may resume in that time."""

    patience_s = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KillScenario:
    """Processes to kill, and the failures of 800 that Dynamo publishes for a similar kill."""

    name: str
    victims: tuple[str, ...]
    plan: StackPlan = PAIRS
    published: str = ""
    published_max: int | None = None


SCENARIOS = (
    KillScenario(name="nothing", victims=(), published="0", published_max=0),
    KillScenario(
        name="gateway",
        victims=("gateway-0",),
        published="frontend 128 to 144",
        published_max=144,
    ),
    KillScenario(
        name="router",
        victims=("router-0",),
        published="processor 120 to 224",
        published_max=224,
    ),
    KillScenario(name="one prefill of two", victims=("prefill-0",), published="2", published_max=2),
    KillScenario(
        name="one decode of two",
        victims=("decode-0",),
        published="2 to 4, of four",
        published_max=4,
    ),
    KillScenario(name="both decodes", victims=("decode-0", "decode-1")),
    KillScenario(name="broker", victims=(BROKER,)),
    KillScenario(
        name="the only decode",
        victims=("decode-0",),
        plan=PAIR,
        published="600",
        published_max=600,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillsOptions:
    """Sets the numbers of the fault tolerance protocol."""

    clients: int = option(8, "of each kind")
    requests: int = option(100, "of each client")
    kill_after_s: float = option(30.0, "s")
    only: tuple[str, ...] = option((), choices=[scenario.name for scenario in SCENARIOS])
    seed: int = option(1)


async def run(options: KillsOptions, console: Console) -> BenchmarkResult:
    """Run every chosen scenario and compare the failures with published ones."""
    rows: dict[str, dict[str, Any]] = {}
    chosen = [
        scenario for scenario in SCENARIOS if not options.only or scenario.name in options.only
    ]
    with counting(console, 22) as progress:
        for plan in dict.fromkeys(scenario.plan for scenario in chosen):
            folder = BENCH_DIR.absolute() / "kills"
            stack = make_stack(plan, folder, decode_step_ms=STEP_MS)
            try:
                await stack.start()
                for scenario in [scenario for scenario in chosen if scenario.plan == plan]:
                    answers = await _play(stack, scenario, options, progress)
                    rows[scenario.name] = figures(answers, options, scenario)
                    await stack.wait_ready()
            finally:
                await stack.stop(grace_s=10)
    sizes = {"prompt_words": PROMPT_WORDS, "answer_tokens": ANSWER_TOKENS}
    load = {**sizes, "decode_step_ms": STEP_MS}
    return BenchmarkResult(figures=rows, bars=bars(rows), tables=[table(rows)], load=load)


async def _play(
    stack: Stack, scenario: KillScenario, options: KillsOptions, progress: Progress
) -> list[ClientAnswer]:
    total = 2 * options.clients * options.requests
    task = progress.add_task(scenario.name, total=total)
    answers: list[ClientAnswer] = []

    async def ask(client: Once | Resuming, rng: random.Random) -> None:
        for _ in range(options.requests):
            answers.append(await client.ask(_question(rng)))
            progress.advance(task)
        await client.close()

    asking = []
    for number in range(options.clients):
        for kind in (Once, Impatient):
            rng = random.Random(f"{options.seed} {scenario.name} {kind.name} {number}")
            asking.append(asyncio.create_task(ask(kind(urls(stack), MODEL, rng), rng)))
    injector = FaultInjector(stack)
    faults = [
        InjectedFault(at_s=options.kill_after_s, name=name, how=KILL) for name in scenario.victims
    ]
    await injector.follow(faults)
    await asyncio.gather(*asking)
    return answers


def _question(rng: random.Random) -> ChatQuestion:
    """Draw a hundred random digits, as Dynamo's clients do."""
    text = " ".join(str(rng.randrange(10)) for _ in range(PROMPT_WORDS))
    messages = [{"role": "user", "content": text}]
    return ChatQuestion(messages=messages, max_tokens=ANSWER_TOKENS, seed=rng.randrange(1 << 30))


def figures(
    answers: Sequence[ClientAnswer], options: KillsOptions, scenario: KillScenario
) -> dict[str, Any]:
    """Return failures and answer times of one scenario, by kind of client."""
    row: dict[str, Any] = {"of": options.clients * options.requests}
    for kind in (Once, Resuming):
        group = [answer for answer in answers if answer.client == kind.name]
        failed = [answer for answer in group if answer.status != WHOLE]
        took_s = [answer.ended_s - answer.asked_s for answer in group if answer.status == WHOLE]
        row[kind.name] = {
            "failed": len(failed),
            "answer_s_p50": round(statistics.median(took_s), 2) if took_s else None,
            "answer_s_max": round(max(took_s), 2) if took_s else None,
            "resumes": sum(answer.resumes for answer in group),
            "why": sorted({f"{answer.status}: {answer.detail}"[:200] for answer in failed})[:5],
        }
    row["published"] = scenario.published
    row["published_max"] = scenario.published_max
    return row


def bars(rows: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return bars: no failures with `Last-Event-ID`, and without it at most the published ones."""
    judged = [
        at_most(f"failed, {name}: with Last-Event-ID", row[Resuming.name]["failed"], 0, "")
        for name, row in rows.items()
    ]
    for name, row in rows.items():
        if row["published_max"] is not None:
            limit = row["published_max"]
            judged.append(at_most(f"failed, {name}: one try", row[Once.name]["failed"], limit, ""))
    return judged


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Return the table of failed requests by scenario."""
    result = Table(
        "killed", "one try", "with Last-Event-ID", "longest answer, s", "Dynamo, published",
        title="Failed requests",
    )  # fmt: skip
    for name, row in rows.items():
        once, resuming = row[Once.name], row[Resuming.name]
        result.add_row(
            name,
            f"{once['failed']} of {row['of']}",
            f"{resuming['failed']} of {row['of']}",
            f"{resuming['answer_s_max']}",
            row["published"],
        )
    return result


BENCHMARK = Benchmark(
    name="kills",
    about=__doc__,
    run=run,
    full=KillsOptions(),
    quick=KillsOptions(requests=20, kill_after_s=5.0),
    quick_help="20 requests a client, killed at 5 s",
)
