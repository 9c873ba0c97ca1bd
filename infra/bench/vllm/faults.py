"""Tests real vLLM under faults: a killed decode worker, an abort storm, and invalid KV handles.

`make bench-vllm-faults`, or `trivium bench vllm-faults`. 1 prefill and 2 decode workers with the
default model on real Kafka and NIXL, one gateway, one router. `killed_decode.py`, `abort_storm.py`
and `wrong_kv.py` measure one fault each. Writes build/bench/vllm_faults.json.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.faults.log_audit import LogAudit, read_audit, read_topic, wait_settled
from infra.bench.results import BENCH_DIR, Bar, table
from infra.bench.stacks import MODEL_START_S as START_S
from infra.bench.stacks import model_stack, running
from infra.bench.vllm import abort_storm, killed_decode, wrong_kv
from infra.bench.vllm.streams import MODEL_HELP, StreamClient, draw_prompt, plain_words
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.settings import ModelSettings
from streams.log.clock import wall_ms
from workers.models.folder import model_folder
from workers.models.wheels import SMOLLM2

PLAN = StackPlan(prefill=1, decode=2)
KILL, STORM, WRONG_KV = "kill", "storm", "wrong-kv"
ENGINE = {"first_token_timeout_ms": 120_000, "progress_timeout_ms": 120_000}
PROMPT_WORDS = (10, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFaultsOptions:
    """Sets which faults to measure, and the load of each."""

    only: tuple[str, ...] = option((), choices=(KILL, STORM, WRONG_KV))
    answers: int = option(20, "streamed while a decode worker is killed")
    tokens: int = option(96, "of each of these")
    kills: int = option(2, "rounds with a kill")
    calls: int = option(200, "that hang up at once")
    prompts: int = option(4, "of each case of wrong KV")
    model: str = option(SMOLLM2, MODEL_HELP)
    seed: int = option(1)

    def has(self, part: str) -> bool:
        """Return whether the options choose this part."""
        return not self.only or part in self.only


async def run(options: VllmFaultsOptions, console: Console) -> BenchmarkResult:
    """Run the chosen parts and return figures and bars."""
    folder = BENCH_DIR.absolute() / "vllm-faults"
    model = Path(model_folder(ModelSettings(path=options.model)))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = plain_words(tokenizer)
    figures: dict[str, Any] = {}
    judged: list[Bar] = []
    if options.has(KILL) or options.has(STORM):
        stack = model_stack(PLAN, folder, model=str(model), engine=ENGINE)
        console.print(f"Starting {', '.join(stack.plan.names())} ...")
        async with running(stack, START_S):
            await _on_stack(stack, words, options, figures, judged, console)
    if options.has(WRONG_KV):
        rng = _rng(options)

        def makes_prompt(tokens: int) -> list[int]:
            return list(tokenizer.encode(draw_prompt(rng, words, tokens)).ids[:tokens])

        figures[WRONG_KV] = await wrong_kv.measure(str(model), makes_prompt, options.prompts)
        judged += wrong_kv.bars(figures[WRONG_KV])
    return BenchmarkResult(
        figures=figures,
        bars=judged,
        tables=[table("Faults", figures)],
        load={"engine": ENGINE, "plan": list(PLAN.names())},
        beside=f"; logs are in {folder}",
    )


async def _on_stack(
    stack: Stack, words: list[str], options: VllmFaultsOptions, figures: dict[str, Any],
    judged: list[Bar], console: Console,
) -> None:  # fmt: skip
    url, model, rng = stack.gateway_urls[0], stack.settings.model.served_name, _rng(options)
    asker, killed_rows = StreamClient(url, model), []
    if options.has(KILL):
        prompts = [
            draw_prompt(rng, words, rng.randint(*PROMPT_WORDS)) for _ in range(options.answers)
        ]
        figures[KILL] = await _kills(stack, asker, prompts, options, console)
        killed_rows = figures[KILL]["killed"]
    if options.has(STORM):
        figures[STORM] = await _storms(stack, words, rng, options, console)
        judged += abort_storm.bars(figures[STORM]["alone"], figures[STORM]["rate"])
    figures["violations"] = [*(await _audited(stack)).violations()]
    if killed_rows:
        worst = max(killed_rows, key=lambda row: len(row["different"]))
        judged[:0] = killed_decode.bars(worst, figures["violations"])
    await asker.hang_up()


async def _storms(
    stack: Stack, words: list[str], rng: random.Random, options: VllmFaultsOptions, console: Console
) -> dict[str, Any]:
    """Run a storm alone, then one beside clients that ask; return figures of both."""
    url, model = stack.gateway_urls[0], stack.settings.model.served_name
    first, second = (
        [draw_prompt(rng, words, abort_storm.STORM_WORDS) for _ in range(options.calls)]
        for _ in range(2)
    )
    console.print(f"A storm of {options.calls} calls, alone ...")
    alone = await abort_storm.storm(stack, url, model, first, is_alone=True)
    console.print(f"A storm of {options.calls} calls, beside answers ...")
    beside, rate = await abort_storm.rates(stack, url, model, words, second, f"{options.seed}")
    audit = await _audited(stack)
    ends = [outcome for several in audit.outcomes.values() for outcome in several]
    cancellations = await read_topic(stack.settings.log, "cancellations")
    alone_row, beside_row = (
        storm.figures(abort_storm.of_storm(ends, storm, until_ms), cancellations)
        for storm, until_ms in ((alone, beside.hung_up_ms), (beside, wall_ms()))
    )
    return {"alone": alone_row, "beside_answers": beside_row, "rate": rate}


async def _kills(
    stack: Stack, asker: StreamClient, prompts: list[str], options: VllmFaultsOptions,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    rounds = []
    expected = await killed_decode.ask_undisturbed(asker, prompts, options.tokens)
    rerun = await killed_decode.ask_undisturbed(asker, prompts, options.tokens)
    for _ in range(options.kills):
        began_s = time.monotonic()
        answers, who = await killed_decode.ask_with_kill(stack, asker, prompts, options.tokens)
        console.print(f"killed {who}; all back after {time.monotonic() - began_s:.0f} s")
        rounds.append(answers)
    audit, prior_tokens = await _audited(stack), await killed_decode.read_prior_tokens(stack)
    rows = []
    for answers in (rerun, *rounds):
        apart = await killed_decode.differences(asker, answers, expected, audit)
        rows.append(killed_decode.figures(answers, prior_tokens, apart))
        console.print(rows[-1], soft_wrap=True)
    return {"undisturbed_again": rows[0], "killed": rows[1:]}


async def _audited(stack: Stack) -> LogAudit:
    await wait_settled(stack.settings.log)
    return await read_audit(stack.settings.log)


def _rng(options: VllmFaultsOptions) -> random.Random:
    return random.Random(options.seed)


BENCHMARK = Benchmark(
    "vllm-faults", __doc__, run, full=VllmFaultsOptions(),
    quick=VllmFaultsOptions(answers=8, tokens=48, kills=1, calls=60, prompts=2),
    quick_help="fewer and shorter answers, one kill",
)  # fmt: skip
