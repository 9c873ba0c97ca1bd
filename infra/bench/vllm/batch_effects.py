"""Counts how often two attempts of a request differ because of their batches, on real vLLM.

`make bench-attempts`, or `trivium bench attempts`. One engine without prefix cache answers each
request alone, alone again, and in batches with others, greedy and with a seed, as a second attempt
on another worker of the same kind would. Writes build/bench/attempts.json.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.results import table
from infra.bench.vllm.streams import MODEL_HELP, draw_prompt, plain_words
from infra.stack.engine_alone import LoneAnswer, generate_answers
from infra.stack.engine_source import start_engine
from schemas.records import Role, Sampling
from schemas.settings import ModelSettings
from workers.llm.engine import Engine
from workers.models.folder import model_folder
from workers.models.wheels import SMOLLM2

ENGINE = {
    "kv_events": False,
    "first_token_timeout_ms": 300_000,
    "progress_timeout_ms": 300_000,
    "extra": json.dumps({"enable_prefix_caching": False}),
}
PROMPT_WORDS = (10, 120)
KINDS = {"greedy": 0.0, "seeded": 0.8}  # temperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsOptions:
    """Sets the requests and the batch sizes to compare."""

    requests: int = option(32)
    tokens: int = option(64, "of each answer")
    batches: tuple[int, ...] = option((2, 8, 16), "sizes")
    model: str = option(SMOLLM2, MODEL_HELP)
    dtype: str = option("float32", "float32, bfloat16 or auto")
    seed: int = option(1)


async def run(options: AttemptsOptions, console: Console) -> BenchmarkResult:
    """Answer all requests alone and in batches, and compare."""
    model = Path(model_folder(ModelSettings(path=options.model)))
    prompts = _prompts(model, options)
    engine = await start_engine(
        "vllm",
        {**ENGINE, "dtype": options.dtype},
        model=ModelSettings(path=str(model)),
        roles=[Role.REPLICA],
        worker_id="attempts",
        worker_epoch=1,
    )
    by_way: dict[str, dict[str, Any]] = {}
    try:
        for kind, temperature in KINDS.items():
            jobs = [_sampled(options, temperature, number) for number in range(len(prompts))]
            inputs = list(zip(prompts, jobs, strict=True))
            alone = await _answers(engine, inputs, 1, f"{kind}, alone")
            for size in (1, *options.batches):
                name = "alone again" if size == 1 else f"batch of {size}"
                rerun = await _answers(engine, inputs, size, f"{kind}, {name}")
                by_way[f"{kind}, {name}"] = compare(alone, rerun)
    finally:
        await engine.close()
    return BenchmarkResult(figures=by_way, tables=[table("Beside alone", by_way)])


async def _answers(
    engine: Engine, inputs: Sequence[tuple[list[int], Sampling]], size: int, name: str
) -> list[list[int]]:
    """Return the tokens of each answer, generated in batches of `size`, one after the other."""
    progress = counting(name, len(inputs))
    results: list[LoneAnswer] = []
    for begin in range(0, len(inputs), size):
        batch = inputs[begin : begin + size]
        results += await generate_answers(
            engine, batch, at_once=size, on_answer=lambda: progress(advance=1)
        )
    return [answer.token_ids for answer in results]


def compare(alone: Sequence[Sequence[int]], rerun: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return how many answers differ, and after how many tokens."""
    places = [
        next(n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        for first, second in zip(alone, rerun, strict=True)
        if first != second
    ]
    return {"answers": len(alone), "different": len(places), "first_difference": sorted(places)}


def _sampled(options: AttemptsOptions, temperature: float, number: int) -> Sampling:
    return Sampling(
        max_tokens=options.tokens, temperature=temperature, seed=number + 1, ignore_eos=True
    )


def _prompts(model: Path, options: AttemptsOptions) -> list[list[int]]:
    rng = random.Random(options.seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words, counts = plain_words(tokenizer), range(options.requests)
    texts = [draw_prompt(rng, words, rng.randint(*PROMPT_WORDS)) for _ in counts]
    return [tokenizer.encode(text).ids for text in texts]


BENCHMARK = Benchmark(
    "attempts", __doc__, run, full=AttemptsOptions(), quick=AttemptsOptions(requests=16, tokens=24),
    quick_help="fewer and shorter answers",
)  # fmt: skip
