"""The platform benchmark: prompts on a topic, a batch, and their usage, while processes die.

`make bench-platform`, or `trivium bench platform --quick`. Part `answers` sends prompts through the
log while a bridge, a router, a worker or a gateway is killed every 5 s and the broker twice, then
as many calls over HTTP under the same kills. Chats beside them measure the time to the first token.
Part `batch` runs a batch file under the same kills. Then a program that shares no code with Trivium
(`checker.py`) counts answers, order, forms and usage in the raw topics. Part `flink` offers five
times the capacity from Flink. Part `vllm` sends prompts with a JSON schema to a real engine. Writes
build/bench/platform.json.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.platform import figures, flink_overload, vllm
from infra.bench.platform.checking import make_task, run_checker
from infra.bench.platform.run import PlatformRun
from infra.bench.platform.stacks import hurt_stack
from infra.bench.results import BENCH_DIR
from infra.bench.retrieval.stacks import running
from streams.log.registry import make_codec

ANSWERS, BATCH, FLINK, VLLM = "answers", "batch", "flink", "vllm"
PARTS = (ANSWERS, BATCH, FLINK, VLLM)
_WARM_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformOptions:
    """Sets which parts run and how much each sends."""

    only: tuple[str, ...] = option((), "these parts", choices=PARTS)
    prompts: int = option(100_000, "through the log while processes die")
    calls: int = option(0, "over HTTP under the same kills; 0: as many as prompts")
    calm: int = option(10_000, "prompts while nothing dies")
    watch_s: float = option(60.0, "s of chats alone")
    hurt_s: float = option(120.0, "s of chats alone, with kills")
    probes: float = option(5.0, "chats a second beside everything else")
    lines: int = option(50_000, "of the batch")
    forms: int = option(200, "answers of a real engine by a JSON schema")
    overload_s: float = option(300.0, "s in which Flink offers five times the capacity")
    seed: int = option(1)


async def run(options: PlatformOptions, console: Console) -> BenchmarkResult:
    """Run the chosen parts and return their figures, bars and tables."""
    findings: dict[str, Any] = {}
    parts = options.only or tuple(part for part in PARTS if part != VLLM or options.forms)
    with counting(console, 34) as progress:
        if {ANSWERS, BATCH} & set(parts):
            findings |= await _measure_under_kills(options, parts, progress)
        if VLLM in parts:
            findings[VLLM] = await vllm.measure(options.forms, options.seed, progress)
    bars = figures.bars(findings)
    if FLINK in parts:
        overload = flink_overload.Overload(seconds=options.overload_s)
        folder = BENCH_DIR.absolute() / "flink"
        findings[FLINK] = await flink_overload.measure(overload, folder, console)
        bars += flink_overload.bars(findings[FLINK])
    return BenchmarkResult(figures=findings, bars=bars, tables=figures.tables(findings))


async def _measure_under_kills(
    options: PlatformOptions, parts: tuple[str, ...], progress: Progress
) -> dict[str, Any]:
    """Run the parts `answers` and `batch` on one stack, then the checker."""
    findings: dict[str, Any] = {}
    starting = progress.add_task("starting the stack", total=1)
    async with running(hurt_stack()) as stack:
        progress.update(starting, completed=1)
        codec = await asyncio.to_thread(make_codec, stack.settings.log)
        bench = PlatformRun(stack, codec, progress, seed=options.seed, rate=options.probes)
        if ANSWERS in parts:
            await bench.watch("first chats", _WARM_S, kill=False)
            steps = {
                "idle": await bench.watch("chats alone", options.watch_s, kill=False),
                "idle_hurt": await bench.watch("chats alone, kills", options.hurt_s, kill=True),
                "calm": await bench.prompts("prompts", options.calm, kill=False),
                "log": await bench.prompts("prompts, kills", options.prompts, kill=True),
                "http": await bench.http(
                    "HTTP, kills", options.calls or options.prompts, kill=True
                ),
            }
            findings[ANSWERS] = {name: step.figures() for name, step in steps.items()}
        if BATCH in parts:
            step = await bench.batch("batch, kills", options.lines, kill=True)
            findings[BATCH] = step.figures()
        await stack.wait_ready()
        checking = progress.add_task("reading the raw topics", total=1)
        checker_task = make_task(
            stack.settings.log, notes=bench.notes, http=bench.http_notes, batches=bench.batches
        )
        findings["checker"] = await run_checker(checker_task, stack.folder)
        progress.update(checking, completed=1)
    return findings


QUICK = PlatformOptions(
    only=(ANSWERS, BATCH),
    overload_s=8.0,
    prompts=3_000,
    calm=1_500,
    watch_s=5.0,
    hurt_s=20.0,
    lines=800,
    forms=0,
)

BENCHMARK = Benchmark(
    name="platform",
    about=__doc__,
    run=run,
    full=PlatformOptions(),
    quick=QUICK,
    quick_help="small numbers, without vLLM and Flink",
)
