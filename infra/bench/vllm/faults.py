"""Real vLLM under faults: a killed decode worker, an abort storm, and KV that must not be used.

`make bench-vllm-faults`, or `trivium bench vllm-faults`. 1 prefill and 2 decode workers with the
default model on real Kafka and NIXL, one gateway, one router. `killed_decode.py`, `abort_storm.py`
and `wrong_kv.py` say what is measured. Writes build/bench/vllm_faults.json.
"""

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from infra.bench.benchmark import Benchmark, Findings, counting, offered
from infra.bench.faults.log_audit import Audit, read_audit, read_topic, settled
from infra.bench.results import BENCH_DIR, Bar
from infra.bench.vllm import abort_storm, killed_decode, wrong_kv
from infra.bench.vllm.streams import Asker
from infra.bench.vllm.words import MODEL_SAID, drawn, plain_words
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.log.clock import wall_ms
from schemas.settings import ModelSettings
from streams.gateway.config import GatewaySettings
from workers.models.folder import model_folder
from workers.models.wheels import SMOLLM2

PLAN = StackPlan(prefill=1, decode=2)
START_S = 420.0
KILL, STORM, WRONG_KV = "kill", "storm", "wrong-kv"
ENGINE = {"first_token_timeout_ms": 120_000, "progress_timeout_ms": 120_000}
PROMPT_WORDS = (10, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which faults, and how much of each."""

    only: tuple[str, ...] = offered((), choices=(KILL, STORM, WRONG_KV))
    answers: int = offered(20, "streamed while a decode worker is killed")
    tokens: int = offered(96, "of each of these")
    kills: int = offered(2, "rounds with a kill")
    calls: int = offered(200, "that hang up at once")
    prompts: int = offered(4, "of each case of wrong KV")
    model: str = offered(SMOLLM2, MODEL_SAID)
    seed: int = offered(1)

    def has(self, part: str) -> bool:
        """Whether it is to be measured."""
        return not self.only or part in self.only


async def run(options: Options, console: Console) -> Findings:
    """All parts."""
    folder = BENCH_DIR.absolute() / "vllm-faults"
    shutil.rmtree(folder, ignore_errors=True)
    model = Path(model_folder(ModelSettings(path=options.model)))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = plain_words(tokenizer)
    found: dict[str, Any] = {}
    judged: list[Bar] = []
    if options.has(KILL) or options.has(STORM):
        stack = make_stack(model, folder)
        console.print(f"Starting {', '.join(stack.plan.names())} ...")
        try:
            await stack.start(timeout_s=START_S)
            await _on_stack(stack, words, options, found, judged, console)
        finally:
            await stack.stop(grace_s=10)
    if options.has(WRONG_KV):
        rng = _rng(options)

        def makes_prompt(tokens: int) -> list[int]:
            return list(tokenizer.encode(drawn(rng, words, tokens)).ids[:tokens])

        with counting(console, 18) as progress:
            found[WRONG_KV] = await wrong_kv.measure(
                str(model), makes_prompt, options.prompts, progress
            )
        judged += wrong_kv.bars(found[WRONG_KV])
    return Findings(
        figures=found,
        bars=judged,
        shown=[table(found)],
        load={"engine": ENGINE, "plan": list(PLAN.names())},
        beside=f"; logs are in {folder}",
    )


def make_stack(model: Path, folder: Path) -> Stack:
    """With the settings of a deployment, but for patience."""
    settings = Settings(
        broker=BrokerSettings(port=0),
        model=ModelSettings(path=str(model)),
        gateway=GatewaySettings(port=0, ttft_ms=600_000, deadline_ms=1_200_000),
        engines={"vllm": ENGINE},
    )
    return Stack(settings, PLAN, folder=folder)


async def _on_stack(
    stack: Stack,
    words: list[str],
    options: Options,
    found: dict[str, Any],
    judged: list[Bar],
    console: Console,
) -> None:
    url, model, rng = stack.gateway_urls[0], stack.settings.model.served_name, _rng(options)
    asker = Asker(url, model)
    if options.has(KILL):
        prompts = [drawn(rng, words, rng.randint(*PROMPT_WORDS)) for _ in range(options.answers)]
        found[KILL] = await _kills(stack, asker, prompts, options, console)
    if options.has(STORM):
        storms = []
        for is_alone in (True, False):
            prompts = [drawn(rng, words, abort_storm.STORM_WORDS) for _ in range(options.calls)]
            console.print(f"A storm of {options.calls} calls, alone: {is_alone} ...")
            if is_alone:
                storms.append(await abort_storm.storm(stack, url, model, prompts, is_alone=True))
                continue
            second, rate = await abort_storm.rates(
                stack, url, model, words, prompts, f"{options.seed}"
            )
            storms.append(second)
        audit = await _audited(stack)
        ends = [each for several in audit.outcomes.values() for each in several]
        gone = await read_topic(stack.settings.log, "cancellations")
        until = [storms[1].hung_up_ms, wall_ms()]
        alone, second_row = (
            each.figures(abort_storm.of_storm(ends, each, end), gone)
            for each, end in zip(storms, until, strict=True)
        )
        found[STORM] = {"alone": alone, "beside_answers": second_row, "rate": rate}
        judged += abort_storm.bars(alone, rate)
    found["violations"] = [*(await _audited(stack)).violations()]
    if options.has(KILL):
        worst = max(found[KILL]["killed"], key=lambda row: len(row["different"]))
        judged[:0] = killed_decode.bars(worst, found["violations"])
    await asker.hang_up()


async def _kills(
    stack: Stack, asker: Asker, prompts: list[str], options: Options, console: Console
) -> dict[str, Any]:
    rounds = []
    expected = await killed_decode.undisturbed(asker, prompts, options.tokens)
    again = await killed_decode.undisturbed(asker, prompts, options.tokens)
    for _ in range(options.kills):
        began_s = time.monotonic()
        seen, who = await killed_decode.killed(stack, asker, prompts, options.tokens)
        console.print(f"killed {who}; all back after {time.monotonic() - began_s:.0f} s")
        rounds.append(seen)
    audit, said = await _audited(stack), await killed_decode.said_before(stack)
    rows = []
    for seen in (again, *rounds):
        apart = await killed_decode.differences(asker, seen, expected, audit)
        rows.append(killed_decode.figures(seen, said, apart))
        console.print(rows[-1], soft_wrap=True)
    return {"undisturbed_again": rows[0], "killed": rows[1:]}


async def _audited(stack: Stack) -> Audit:
    await settled(stack.settings.log)
    return await read_audit(stack.settings.log)


def _rng(options: Options) -> random.Random:
    return random.Random(options.seed)


def table(found: dict[str, Any]) -> Table:
    """What was found."""
    shown = Table("fault", "found", title="Faults")
    for name, row in found.items():
        shown.add_row(name, str(row))
    return shown


BENCHMARK = Benchmark(
    name="vllm-faults",
    about=__doc__,
    run=run,
    full=Options(),
    quick=Options(answers=8, tokens=48, kills=1, calls=60, prompts=2),
    quick_said="fewer and shorter answers, one kill",
)
