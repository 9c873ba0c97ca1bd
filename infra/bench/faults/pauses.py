"""Measures how long an answer pauses when its decode worker is killed in the middle.

`trivium bench pauses`. Streams answers of several lengths. Half of them continue on another worker,
and half restart there, since they have a stop string. When all have the length to measure, one of
two decode workers is killed. Engines are simulated, with the speeds of a small model on a GPU: 10
ms per token, 10 000 prompt tokens/s. Writes build/bench/pauses.json.
"""

import asyncio
import random
import signal
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.faults.http_clients import WHOLE, Balanced, ChatQuestion, ClientAnswer
from infra.bench.results import BENCH_DIR, Bar, at_most, ratio, table
from infra.bench.stacks import MODEL, make_stack, running, urls
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan

PLAN = StackPlan(prefill=1, decode=2)
SPEEDS: dict[str, Any] = {"prefill_ms_per_token": 0.1, "decode_step_ms": 10.0}
GOES_ON, ANEW = "goes on", "begins anew"
NEVER_SAID = "\x01"  # an answer with a stop string restarts
REST = 300  # tokens still to generate when the worker dies
PROMPT_MAX = 100
PAUSE_S = 2.0  # shorter pauses do not come from a lost worker, whose lease must end first
PATIENCE_S = 300.0
_LOOK_S = 0.01
GROWTH_MAX = 1.5  # of the pause, from the shortest to the longest answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PausesOptions:
    """Sets the lengths of answers and the number of streams."""

    tokens: tuple[int, ...] = option((100, 1_000, 4_000), "of an answer when its worker dies")
    streams: int = option(4, "of each kind, at once")


async def run(options: PausesOptions, console: Console) -> BenchmarkResult:
    """Measure all lengths on one stack; the killed worker is ready again before the next one."""
    stack = make_stack(PLAN, BENCH_DIR.absolute() / "pauses", **SPEEDS)
    model = replace(stack.settings.model, max_model_len=max(options.tokens) + REST + PROMPT_MAX)
    stack.settings = replace(stack.settings, model=model)
    rows: dict[str, dict[str, Any]] = {}
    async with running(stack):
        client = Balanced(urls(stack), MODEL, random.Random(0))
        for tokens in options.tokens:
            rows[str(tokens)] = await _row(stack, client, tokens, options.streams)
            console.print(f"{tokens} tokens: {rows[str(tokens)]}", soft_wrap=True)
        await client.close()
    tables = [table("Median pause, s", rows, f"{GOES_ON}.median_s", f"{ANEW}.median_s")]
    return BenchmarkResult(figures=rows, bars=bars(rows), tables=tables, load={"sim": SPEEDS})


async def _row(stack: Stack, client: Balanced, tokens: int, count: int) -> dict[str, Any]:
    kinds = [GOES_ON, GOES_ON, ANEW, ANEW] * ((count + 1) // 2)  # workers take requests in turn
    answers = [ClientAnswer(client=kind) for kind in kinds]

    def question(number: int) -> ChatQuestion:
        messages = [{"role": "user", "content": f"{tokens}: {number}?"}]
        stop = [NEVER_SAID] if kinds[number] == ANEW else []
        return ChatQuestion(messages=messages, max_tokens=tokens + REST, stop=stop)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for number, answer in enumerate(answers):
            group.create_task(client.ask(question(number), into=answer))
        while True:
            if all(len(answer.token_ids) >= tokens or answer.status for answer in answers):
                break
            await asyncio.sleep(_LOOK_S)
        await stack.kill("decode-0", signal.SIGKILL)
    await stack.wait_ready()
    return {kind: pauses([s for s in answers if s.client == kind]) for kind in (GOES_ON, ANEW)}


def pauses(answers: list[ClientAnswer]) -> dict[str, Any]:
    """Return figures of the longest pause of each answer that was interrupted."""
    longest = [max((b - a for a, b in pairwise(answer.times_s)), default=0.0) for answer in answers]
    pauses_s = [round(pause_s, 2) for pause_s in longest if pause_s > PAUSE_S]
    return {
        "interrupted": len(pauses_s),
        "not_whole": sum(answer.status != WHOLE for answer in answers),
        "median_s": statistics.median(pauses_s) if pauses_s else None,
        "max_s": max(pauses_s, default=None),
    }


def bars(rows: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return bars: all answers are whole, and the pause hardly grows with the answer's length."""
    broken_answers = sum(counts["not_whole"] for row in rows.values() for counts in row.values())
    medians_s = [row[GOES_ON]["median_s"] for row in rows.values()]
    label = "pause of answers that go on, longest over shortest answer"
    return [
        at_most("answers that are not whole", broken_answers, 0),
        at_most(label, ratio(medians_s[-1], medians_s[0]), GROWTH_MAX),
    ]


BENCHMARK = Benchmark(
    "pauses", __doc__, run, full=PausesOptions(), quick=PausesOptions(tokens=(100, 1_000)),
    quick_help="100 and 1 000 tokens",
)  # fmt: skip
