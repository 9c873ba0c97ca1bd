"""Measures how long an answer pauses when its decode worker is killed in the middle.

`trivium bench pauses`. Streams answers of several lengths. Half of them continue on another worker,
and half restart there, since they have a stop string. When all have the length to measure, one of
two decode workers is killed. Engines are simulated, with the speeds of a small model on a GPU: 10
ms per token, 10 000 prompt tokens/s. Writes build/bench/pauses.json.
"""

import asyncio
import json
import signal
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.faults.target_stack import MODEL, make_stack
from infra.bench.results import BENCH_DIR, Bar, at_most
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
    try:
        await stack.start()
        async with httpx.AsyncClient(base_url=stack.gateway_urls[0], timeout=PATIENCE_S) as client:
            for tokens in options.tokens:
                rows[str(tokens)] = await _row(stack, client, tokens, options.streams)
                console.print(f"{tokens} tokens: {rows[str(tokens)]}", soft_wrap=True)
    finally:
        await stack.stop(grace_s=10)
    return BenchmarkResult(
        figures=rows, bars=bars(rows), tables=[table(rows)], load={"sim": SPEEDS}
    )


async def _row(stack: Stack, client: httpx.AsyncClient, tokens: int, count: int) -> dict[str, Any]:
    kinds = [GOES_ON, GOES_ON, ANEW, ANEW] * ((count + 1) // 2)  # workers take requests in turn
    answers = [ClientAnswer(client=kind) for kind in kinds]
    asking = [
        asyncio.create_task(_ask(client, answer, tokens + REST, f"{tokens}: {number}?"))
        for number, answer in enumerate(answers)
    ]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if all(len(answer.token_ids) >= tokens for answer in answers):
                break
            if failed := [task for task in asking if task.done()]:
                await asyncio.gather(*failed)
            await asyncio.sleep(_LOOK_S)
        await stack.kill("decode-0", signal.SIGKILL)
        await asyncio.gather(*asking)
        await stack.wait_ready()
    return {kind: pauses([s for s in answers if s.client == kind]) for kind in (GOES_ON, ANEW)}


async def _ask(client: httpx.AsyncClient, answer: ClientAnswer, tokens: int, question: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    if answer.client == ANEW:
        body["stop"] = [NEVER_SAID]
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.read(json.loads(line.removeprefix("data: ")), time.monotonic())


def pauses(answers: list[ClientAnswer]) -> dict[str, Any]:
    """Return figures of the longest pause of each answer that was interrupted."""
    longest = [max(b - a for a, b in pairwise(answer.times_s)) for answer in answers]
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
    medians = [row[GOES_ON]["median_s"] for row in rows.values()]
    ends = medians[0], medians[-1]
    growth = ends[1] / ends[0] if all(ends) else None
    return [
        at_most("answers that are not whole", broken_answers, 0, ""),
        at_most(
            "pause of answers that go on, longest over shortest answer", growth, GROWTH_MAX, ""
        ),
    ]


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Return the table of median pauses by length of the answer."""
    result = Table("tokens of the answer", GOES_ON, ANEW, title="Median pause, s")
    for tokens, row in rows.items():
        medians_s = [row[kind]["median_s"] for kind in (GOES_ON, ANEW)]
        result.add_row(
            tokens, *("-" if median_s is None else f"{median_s:.1f}" for median_s in medians_s)
        )
    return result


BENCHMARK = Benchmark(
    name="pauses",
    about=__doc__,
    run=run,
    full=PausesOptions(),
    quick=PausesOptions(tokens=(100, 1_000)),
    quick_help="100 and 1 000 tokens",
)
