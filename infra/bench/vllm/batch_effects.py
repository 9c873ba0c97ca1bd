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
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from infra.bench.benchmark import Benchmark, BenchmarkResult, counting, option
from infra.bench.vllm.words import MODEL_HELP, plain_words
from infra.stack.engine_alone import LoneAnswer, generate_answers
from infra.stack.engine_source import start_engine
from schemas.records import Role, Sampling
from schemas.settings import ModelSettings
from workers.llm.engine import Engine
from workers.models.folder import model_folder
from workers.models.wheels import SMOLLM2

ENGINE = {
    "kv_events": False,
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
        with counting(console, 24) as progress:
            for kind, temperature in KINDS.items():
                jobs = [_sampled(options, temperature, number) for number in range(len(prompts))]
                inputs = list(zip(prompts, jobs, strict=True))
                alone = await _answers(engine, inputs, 1, f"{kind}, alone", progress)
                for size in (1, *options.batches):
                    name = "alone again" if size == 1 else f"batch of {size}"
                    rerun = await _answers(engine, inputs, size, f"{kind}, {name}", progress)
                    by_way[f"{kind}, {name}"] = compare(alone, rerun)
    finally:
        await engine.close()
    return BenchmarkResult(figures=by_way, tables=[table(by_way)])


async def _answers(
    engine: Engine,
    inputs: Sequence[tuple[list[int], Sampling]],
    size: int,
    name: str,
    progress: Progress,
) -> list[list[int]]:
    """Return the tokens of each answer, generated in batches of `size`, one after the other."""
    task = progress.add_task(name, total=len(inputs))
    results: list[LoneAnswer] = []
    for begin in range(0, len(inputs), size):
        batch = inputs[begin : begin + size]
        results += await generate_answers(
            engine, batch, at_once=size, on_answer=lambda: progress.advance(task)
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


def table(figures: dict[str, dict[str, Any]]) -> Table:
    """Return the table of differences, a row for each way."""
    result = Table("as", "answers", "different", "equal tokens before", title="Beside alone")
    for name, row in figures.items():
        places = row["first_difference"]
        before = f"{places[0]} to {places[-1]}" if places else ""
        result.add_row(name, str(row["answers"]), str(row["different"]), before)
    return result


def _sampled(options: AttemptsOptions, temperature: float, number: int) -> Sampling:
    return Sampling(
        max_tokens=options.tokens, temperature=temperature, seed=number + 1, ignore_eos=True
    )


def _prompts(model: Path, options: AttemptsOptions) -> list[list[int]]:
    rng = random.Random(options.seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = plain_words(tokenizer)
    texts = [
        " ".join(rng.choices(words, k=rng.randint(*PROMPT_WORDS))) for _ in range(options.requests)
    ]
    return [tokenizer.encode(text).ids for text in texts]


BENCHMARK = Benchmark(
    name="attempts",
    about=__doc__,
    run=run,
    full=AttemptsOptions(),
    quick=AttemptsOptions(requests=16, tokens=24),
    quick_help="fewer and shorter answers",
)
