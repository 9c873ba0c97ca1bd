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
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, measuring, option
from infra.bench.faults import verdict
from infra.bench.platform import figures, flink
from infra.bench.platform.questions import FORM_EVERY, draw_questions
from infra.bench.platform.steps import RUNNING_MAX, PlatformRun
from infra.bench.results import BENCH_DIR
from infra.bench.stacks import make_stack, model_stack, running
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from streams.bridge.config import BridgeSettings, TopicPair

ANSWERS, BATCH, FLINK, VLLM = "answers", "batch", "flink", "vllm"
PARTS = (ANSWERS, BATCH, FLINK, VLLM)
PLAN = StackPlan(prefill=1, decode=1, replica=1, routers=2, gateways=2, bridges=2)
STEP_MS = 20.0  # so slow that slots of engines limit the rate, and not the cores
_WARM_S = 3.0
_TRIES, _PAUSE_S = 12, 5.0  # of the checker: requests of a killed gateway end after 30 s


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
    if {ANSWERS, BATCH} & set(parts):
        findings |= await _measure_under_kills(options, parts)
    if VLLM in parts:
        findings[VLLM] = await _measure_forms(options)
    bars = figures.bars(findings)
    if FLINK in parts:
        overload = flink.Overload(seconds=options.overload_s)
        findings[FLINK] = await flink.measure(overload, BENCH_DIR.absolute() / "flink", console)
        bars += flink.bars(findings[FLINK])
    return BenchmarkResult(figures=findings, bars=bars, tables=figures.tables(findings))


def hurt_stack() -> Stack:
    """Return a stack with simulated engines, where answers with one key keep their order."""
    stack = make_stack(
        PLAN, BENCH_DIR.absolute() / "platform", decode_step_ms=STEP_MS, running_max=RUNNING_MAX
    )
    prefix = stack.settings.log.topic_prefix
    pair = TopicPair(prompts=f"{prefix}prompts", answers=f"{prefix}answers", ordered=True)
    stack.settings = replace(stack.settings, bridge=BridgeSettings(pairs=(pair,)))
    return stack


async def _measure_under_kills(options: PlatformOptions, parts: tuple[str, ...]) -> dict[str, Any]:
    """Run the parts `answers` and `batch` on one stack, then the checker."""
    findings: dict[str, Any] = {}
    async with running(hurt_stack()) as stack:
        bench = await PlatformRun.create(stack, seed=options.seed, rate=options.probes)
        if ANSWERS in parts:
            await bench.watch("first chats", _WARM_S, kill=False)
            calls = options.calls or options.prompts
            findings[ANSWERS] = {
                "idle": await bench.watch("chats alone", options.watch_s, kill=False),
                "idle_hurt": await bench.watch("chats alone, kills", options.hurt_s, kill=True),
                "calm": await bench.prompts("prompts", options.calm, kill=False),
                "log": await bench.prompts("prompts, kills", options.prompts, kill=True),
                "http": await bench.http("HTTP, kills", calls, kill=True),
            }
        if BATCH in parts:
            findings[BATCH] = await bench.batch("batch, kills", options.lines, kill=True)
        await stack.wait_ready()
        with measuring("reading the raw topics"):
            findings["checker"] = await checked(bench)
    return findings


async def _measure_forms(options: PlatformOptions) -> dict[str, Any]:
    """Send prompts with a schema to the model that `trivium up` serves, and check the answers."""
    plan = StackPlan(prefill=0, decode=0, replica=1, bridges=1)
    async with running(model_stack(plan, BENCH_DIR.absolute() / "platform-vllm")) as stack:
        bench = await PlatformRun.create(stack, seed=options.seed, rate=0.0)
        questions = draw_questions(options.forms * FORM_EVERY, options.seed)
        form_questions = [question for question in questions if question.has_form]
        name = "a real engine, by a schema"
        row = await bench.ask(name, form_questions, options.forms, kill=False)
        return {**row, "checker": await checked(bench, ordered=False)}


async def checked(bench: PlatformRun, *, ordered: bool = True) -> dict[str, Any]:
    """Return what the checker finds, up to `_TRIES` times until every request has its usage."""
    task = verdict.pairs_task(
        bench.stack.settings.log, notes=bench.notes, http=bench.http_notes, ordered=ordered,
        batches=bench.batches,
    )  # fmt: skip
    for _ in range(_TRIES):
        findings = await verdict.run_checker(task, bench.stack.folder)
        if not findings["usage"]["requests_without_record"]["count"]:
            break
        await asyncio.sleep(_PAUSE_S)
    return findings


BENCHMARK = Benchmark(
    "platform",
    __doc__,
    run,
    full=PlatformOptions(),
    quick=PlatformOptions(
        only=(ANSWERS, BATCH), overload_s=8.0, prompts=3_000, calm=1_500, watch_s=5.0,
        hurt_s=20.0, lines=800, forms=0,
    ),
    quick_help="small numbers, without vLLM and Flink",
)  # fmt: skip
