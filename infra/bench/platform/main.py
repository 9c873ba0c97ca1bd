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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import Benchmark, BenchmarkResult, measuring, option
from infra.bench.faults import verdict
from infra.bench.platform import flink
from infra.bench.platform.questions import FORM_EVERY, draw_questions
from infra.bench.platform.steps import RUNNING_MAX, PlatformRun
from infra.bench.results import BENCH_DIR, Bar, at_least, at_most, ratio, table
from infra.bench.stacks import make_stack, model_stack, running
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from streams.bridge.config import BridgeSettings, TopicPair

ANSWERS, BATCH, FLINK, VLLM = "answers", "batch", "flink", "vllm"
PARTS = (ANSWERS, BATCH, FLINK, VLLM)
PLAN = StackPlan(prefill=1, decode=1, replica=1, routers=2, gateways=2, bridges=2)
STEP_MS = 20.0  # so slow that slots of engines limit the rate, and not the cores
PROMPTS, LINES = "prompts", "batch.prompts"
RATE_SHARE, TTFT_RATIO, GROWTH, VALID = 0.9, 1.5, 1.2, 0.9999
_PAIR = {
    "missing": "without an answer",
    "double": "with several answers",
    "of_no_prompt": "answers to no prompt",
    "under_another_key": "answers under another key",
    "sent_but_not_there": "acknowledged and not in the log",
    "out_of_order": "answers before an earlier one of their key",
    "error_count": "answered with an error",
    "lag": "not committed",
}
_BATCH = {"missing": "lines missing in its files", "double": "lines there twice",
          "errors": "lines with an error"}  # fmt: skip
_USAGE = {
    "difference_tokens": "tokens off what clients counted",
    "requests_without_record": "requests without a record",
    "extra": "records too many",
    "gaps": "partitions with a gap in numbers",
}
_STEP_COLUMNS = ("answers", "seconds", "rate_per_s", "ttft_ms", "killed", "bridge_mib_max")
_PAIR_COLUMNS = ("prompts", "answers", "missing.count", "double.count", "out_of_order.count",
                 "errors")  # fmt: skip
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
    judged = bars(findings)
    if FLINK in parts:
        overload = flink.Overload(seconds=options.overload_s)
        findings[FLINK] = await flink.measure(overload, BENCH_DIR.absolute() / "flink", console)
        judged += flink.bars(findings[FLINK])
    return BenchmarkResult(figures=findings, bars=judged, tables=tables(findings))


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


def bars(findings: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the parts that ran."""
    judged: list[Bar] = []
    checker = findings.get("checker", {})
    if "answers" in findings:
        judged += _pair_bars("prompts", _pair(checker, PROMPTS))
        judged += _load_bars(findings["answers"])
    if "batch" in findings:
        judged += _pair_bars("lines of the batch", _pair(checker, LINES))
        for path, label in _BATCH.items():
            counts = [batch[path] for batch in checker["batches"]]
            total = sum(n if isinstance(n, int) else n["count"] for n in counts)
            judged.append(at_most(f"batch: {label}", total, 0))
    if checker:
        usage = checker["usage"]
        extra = usage["double"]["count"] + usage["records_without_request"]["count"]
        judged += verdict.nought({**usage, "extra": extra}, _USAGE, "usage: ")
        judged += _form_bars("simulated engines", list(checker["pairs"].values()))
    if "vllm" in findings:
        pair = _pair(findings["vllm"]["checker"], PROMPTS)
        amiss = sum(pair[name]["count"] for name in ("missing", "double", "of_no_prompt"))
        judged += _form_bars("a real engine", [pair])
        judged.append(at_most("a real engine: prompts without one answer", amiss, 0))
    return judged


def _pair(checker: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the findings of one pair of topics, whatever their prefix."""
    topics = [t for t in checker["pairs"] if t.endswith(LINES) is (name == LINES)]
    pair: Mapping[str, Any] = checker["pairs"][topics[0]]
    return pair


def _pair_bars(what: str, pair: Mapping[str, Any]) -> list[Bar]:
    return verdict.nought({**pair, "error_count": sum(pair["errors"].values())}, _PAIR, f"{what}: ")


def _load_bars(steps: Mapping[str, Any]) -> list[Bar]:
    ttft = {name: step["ttft_ms"]["p99"] for name, step in steps.items()}
    rate = ratio(steps["log"]["rate_per_s"], steps["http"]["rate_per_s"])
    calm, hurt = ratio(ttft["calm"], ttft["idle"]), ratio(ttft["log"], ttft["idle_hurt"])
    memory = steps["log"]["bridge_memory_growth"]
    return [
        at_least("prompts: rate beside HTTP, kills", rate, RATE_SHARE),
        at_most("HTTP TTFT p99 beside prompts, of idle", calm, TTFT_RATIO),
        at_most("HTTP TTFT p99 beside prompts, of idle, both with kills", hurt, TTFT_RATIO),
        at_most("a bridge's memory, last third over first", memory, GROWTH),
    ]


def _form_bars(what: str, pairs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    form_count = sum(pair["forms"]["wanted"] for pair in pairs)
    invalid = sum(pair["forms"]["invalid"]["count"] for pair in pairs)
    share = 1 - invalid / form_count if form_count else None
    return [at_least(f"{what}: answers that keep to their schema", share, VALID)]


def tables(findings: Mapping[str, Any]) -> list[Table]:
    """Return tables of the steps and of the checker's counts."""
    steps = {**findings.get("answers", {})}
    steps |= {name: findings[name] for name in ("batch", "vllm") if name in findings}
    rows = {name: {**row, "killed": sum(row["killed"].values())} for name, row in steps.items()}
    result = [table("Steps", rows, *_STEP_COLUMNS)]
    if checker := findings.get("checker"):
        result.append(table("What the checker counted", checker["pairs"], *_PAIR_COLUMNS))
    return result


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
