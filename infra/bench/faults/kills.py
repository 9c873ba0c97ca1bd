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

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.faults.http_clients import WHOLE, ChatQuestion, ClientAnswer, Once, Resuming
from infra.bench.faults.kill_schedule import BROKER, KILL, FaultInjector, InjectedFault
from infra.bench.results import BENCH_DIR, Bar, at_most, table
from infra.bench.stacks import MODEL, make_stack, running, urls
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

PAIRS, PAIR = StackPlan(prefill=2, decode=2), StackPlan(prefill=1, decode=1)
STEP_MS = 8.0
PROMPT_WORDS, ANSWER_TOKENS = 100, 100


class Impatient(Resuming):
    """Waits as long for an answer as Dynamo's client, and may resume in that time."""

    patience_s = 30.0


@dataclass(frozen=True, slots=True)
class KillScenario:
    """Processes to kill, and the failures of 800 that Dynamo publishes for a similar kill."""

    name: str
    victims: tuple[str, ...]
    published: str = ""
    published_max: int | None = None
    plan: StackPlan = PAIRS


SCENARIOS = (
    KillScenario("nothing", (), "0", 0),
    KillScenario("gateway", ("gateway-0",), "frontend 128 to 144", 144),
    KillScenario("router", ("router-0",), "processor 120 to 224", 224),
    KillScenario("one prefill of two", ("prefill-0",), "2", 2),
    KillScenario("one decode of two", ("decode-0",), "2 to 4, of four", 4),
    KillScenario("both decodes", ("decode-0", "decode-1")),
    KillScenario("broker", (BROKER,)),
    KillScenario("the only decode", ("decode-0",), "600", 600, plan=PAIR),
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
    chosen = [row for row in SCENARIOS if not options.only or row.name in options.only]
    for plan in dict.fromkeys(scenario.plan for scenario in chosen):
        stack = make_stack(plan, BENCH_DIR.absolute() / "kills", decode_step_ms=STEP_MS)
        async with running(stack):
            for scenario in [scenario for scenario in chosen if scenario.plan == plan]:
                answers = await _play(stack, scenario, options)
                rows[scenario.name] = figures(answers, options, scenario)
                await stack.wait_ready()
    columns = [f"{kind.name}.{name}" for kind in (Once, Resuming)
               for name in ("failed", "answer_s_max")]  # fmt: skip
    load = {"prompt_words": PROMPT_WORDS, "answer_tokens": ANSWER_TOKENS, "decode_step_ms": STEP_MS}
    tables = [table("Failed requests by what was killed", rows, "of", *columns, "published")]
    return BenchmarkResult(figures=rows, bars=bars(rows), tables=tables, load=load)


async def _play(stack: Stack, scenario: KillScenario, options: KillsOptions) -> list[ClientAnswer]:
    progress = counting(scenario.name, 2 * options.clients * options.requests)
    answers: list[ClientAnswer] = []

    async def ask(client: Once | Resuming, rng: random.Random) -> None:
        for _ in range(options.requests):
            answers.append(await client.ask(_question(rng)))
            progress(advance=1)
        await client.close()

    asking = []
    for number in range(options.clients):
        for kind in (Once, Impatient):
            rng = random.Random(f"{options.seed} {scenario.name} {kind.name} {number}")
            asking.append(asyncio.create_task(ask(kind(urls(stack), MODEL, rng), rng)))
    at_s = options.kill_after_s
    faults = [InjectedFault(at_s=at_s, name=name, how=KILL) for name in scenario.victims]
    await FaultInjector(stack).follow(faults)
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
    limits = {name: row["published_max"] for name, row in rows.items()}
    return [
        *(at_most(f"failed, {name}: with Last-Event-ID", row[Resuming.name]["failed"], 0)
          for name, row in rows.items()),
        *(at_most(f"failed, {name}: one try", rows[name][Once.name]["failed"], limit)
          for name, limit in limits.items() if limit is not None),
    ]  # fmt: skip


BENCHMARK = Benchmark(
    "kills", __doc__, run, full=KillsOptions(), quick=KillsOptions(requests=20, kill_after_s=5.0),
    quick_help="20 requests a client, killed at 5 s",
)  # fmt: skip
