"""Dynamo's fault tolerance protocol: 8 clients of 100 requests, a process killed after 30 s.

`make bench-kills`, or `trivium bench kills`. For each kind of process: how many of 800
requests fail, for clients that try once (theirs), and for as many beside them that resume with
`Last-Event-ID`. Engines are simulated; prompts and answers have their lengths. Writes
build/bench/kills.json, with the published figures beside ours.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infra.bench.arguments import chosen, run_and_print
from infra.bench.faults.http_clients import WHOLE, Once, Question, Resuming, Seen
from infra.bench.faults.kill_schedule import BROKER, KILL, Blow, Killer
from infra.bench.faults.target_stack import MODEL, make_stack, urls
from infra.bench.results import BENCH_DIR, Bar, at_most, command_line, show_bars, write_report
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

PAIRS, PAIR = StackPlan(prefill=2, decode=2), StackPlan(prefill=1, decode=1)
STEP_MS = 8.0
PROMPT_WORDS, ANSWER_TOKENS = 100, 100
PATIENCE_S = 30.0  # of a client for one answer, however often it resumes; theirs wait as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Which processes are killed; what Dynamo publishes for the like of it, of 800."""

    name: str
    victims: tuple[str, ...]
    plan: StackPlan = PAIRS
    published: str = ""
    published_max: int | None = None


SCENARIOS = (
    Scenario(name="nothing", victims=(), published="0", published_max=0),
    Scenario(
        name="gateway",
        victims=("gateway-0",),
        published="frontend 128 to 144",
        published_max=144,
    ),
    Scenario(
        name="router",
        victims=("router-0",),
        published="processor 120 to 224",
        published_max=224,
    ),
    Scenario(name="one prefill of two", victims=("prefill-0",), published="2", published_max=2),
    Scenario(
        name="one decode of two",
        victims=("decode-0",),
        published="2 to 4, of four",
        published_max=4,
    ),
    Scenario(name="both decodes", victims=("decode-0", "decode-1")),
    Scenario(name="broker", victims=(BROKER,)),
    Scenario(
        name="the only decode",
        victims=("decode-0",),
        plan=PAIR,
        published="600",
        published_max=600,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The protocol's numbers."""

    clients: int = 8  # of each kind
    requests: int = 100  # of each client
    kill_after_s: float = 30.0
    only: tuple[str, ...] = ()
    seed: int = 1


QUICK = Options(requests=20, kill_after_s=5.0)


async def run(options: Options, console: Console) -> dict[str, Any]:
    """Every scenario; returns the report."""
    found: dict[str, list[Seen]] = {}
    chosen = [each for each in SCENARIOS if not options.only or each.name in options.only]
    columns = (TextColumn("{task.description:<22}"), BarColumn(24), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for plan in dict.fromkeys(each.plan for each in chosen):
            folder = BENCH_DIR.absolute() / "kills"
            stack = make_stack(plan, folder, decode_step_ms=STEP_MS)
            try:
                await stack.start()
                for scenario in [each for each in chosen if each.plan == plan]:
                    found[scenario.name] = await _play(stack, scenario, options, progress)
                    await stack.wait_ready()
            finally:
                await stack.stop(grace_s=10)
    scenarios = {each.name: each for each in chosen}
    rows = {name: figures(seen, options, scenarios[name]) for name, seen in found.items()}
    judged = bars(rows)
    path = write_report(
        "kills",
        command=command_line(),
        seed=options.seed,
        load={
            **asdict(options),
            "prompt_words": PROMPT_WORDS,
            "answer_tokens": ANSWER_TOKENS,
            "decode_step_ms": STEP_MS,
        },
        figures=rows,
        bars=judged,
        folder=BENCH_DIR,
    )
    console.print(table(rows))
    show_bars(judged, console)
    console.print(f"Written to {path}.")
    report: dict[str, Any] = json.loads(path.read_text())
    return report


async def _play(
    stack: Stack, scenario: Scenario, options: Options, progress: Progress
) -> list[Seen]:
    total = 2 * options.clients * options.requests
    task = progress.add_task(scenario.name, total=total)
    seen: list[Seen] = []

    async def ask(client: Once | Resuming, rng: random.Random) -> None:
        for _ in range(options.requests):
            seen.append(await client.ask(_question(rng)))
            progress.advance(task)
        await client.close()

    asking = []
    for number in range(options.clients):
        for kind in (Once, Resuming):
            rng = random.Random(f"{options.seed} {scenario.name} {kind.name} {number}")
            asking.append(asyncio.create_task(ask(_client(kind, stack, rng), rng)))
    killer = Killer(stack)
    blows = [Blow(at_s=options.kill_after_s, name=name, how=KILL) for name in scenario.victims]
    await killer.follow(blows)
    await asyncio.gather(*asking)
    return seen


def _client(kind: type[Once] | type[Resuming], stack: Stack, rng: random.Random) -> Once | Resuming:
    if kind is Once:
        return Once(urls(stack), MODEL, rng)
    return Resuming(urls(stack), MODEL, rng, patience_s=PATIENCE_S)


def _question(rng: random.Random) -> Question:
    """As theirs: a hundred random digits."""
    text = " ".join(str(rng.randrange(10)) for _ in range(PROMPT_WORDS))
    messages = [{"role": "user", "content": text}]
    return Question(messages=messages, max_tokens=ANSWER_TOKENS, seed=rng.randrange(1 << 30))


def figures(seen: Sequence[Seen], options: Options, scenario: Scenario) -> dict[str, Any]:
    """One scenario."""
    found: dict[str, Any] = {"of": options.clients * options.requests}
    for kind in (Once, Resuming):
        mine = [each for each in seen if each.client == kind.name]
        failed = [each for each in mine if each.ended != WHOLE]
        took_s = [each.ended_s - each.asked_s for each in mine if each.ended == WHOLE]
        found[kind.name] = {
            "failed": len(failed),
            "answer_s_p50": round(statistics.median(took_s), 2) if took_s else None,
            "answer_s_max": round(max(took_s), 2) if took_s else None,
            "resumes": sum(each.resumes for each in mine),
            "why": sorted({f"{each.ended}: {each.detail}"[:200] for each in failed})[:5],
        }
    found["published"] = scenario.published
    found["published_max"] = scenario.published_max
    return found


def bars(rows: dict[str, dict[str, Any]]) -> list[Bar]:
    """Nobody who resumes fails; of the others no more than are published."""
    found = [
        at_most(f"failed, {name}: with Last-Event-ID", row[Resuming.name]["failed"], 0, "")
        for name, row in rows.items()
    ]
    for name, row in rows.items():
        if row["published_max"] is not None:
            most = row["published_max"]
            found.append(at_most(f"failed, {name}: one try", row[Once.name]["failed"], most, ""))
    return found


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Failed of all."""
    shown = Table(
        "killed", "one try", "with Last-Event-ID", "longest answer, s", "Dynamo, published",
        title="Failed requests",
    )  # fmt: skip
    for name, row in rows.items():
        once, resuming = row[Once.name], row[Resuming.name]
        shown.add_row(
            name,
            f"{once['failed']} of {row['of']}",
            f"{resuming['failed']} of {row['of']}",
            f"{resuming['answer_s_max']}",
            row["published"],
        )
    return shown


def parse(arguments: Sequence[str]) -> tuple[Options, bool]:
    """Options and whether to print the report as JSON."""
    parser = argparse.ArgumentParser(prog="bench kills", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 requests a client, killed at 5 s")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    parser.add_argument("--clients", type=int, help="of each kind")
    parser.add_argument("--requests", type=int, help="of each client")
    parser.add_argument("--kill-after", type=float, dest="kill_after_s", help="s")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--seed", type=int)
    return chosen(parser, arguments, full=Options(), quick=QUICK)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of `trivium bench kills`."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is away is no news
    run_and_print(arguments, parse, run)


if __name__ == "__main__":
    main()
