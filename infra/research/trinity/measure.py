"""Measures figure 1's points on this machine: `trivium evaluate trinity --measure`.

Prefill: a batch of prompts at once, with one answer token each. Decode: a batch of answers at once,
after short prompts. Search: a number of callers that search without pause, on one thread's places.
Each point is the best of its repeats, as the machine has other users.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from infra.bench.results import command_line, commit, machine
from infra.bench.search.vectors import overlapping
from infra.research.trinity.stage_measurements import FILE, StageMeasurement
from infra.stack.engine_alone import generate_answers
from infra.stack.engine_source import start_engine
from schemas.records import Role, Sampling
from schemas.settings import ModelSettings
from workers.llm.engine import Engine
from workers.models.folder import model_folder
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Query

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT, SHORT, ANSWER = 64, 8, 24  # tokens
ROWS, DIM, TOP_M = 50_000, 384, 64
_SEARCHES = 512  # of a single caller; several callers share them
_REPEATS = 2
_ENGINE = {
    "kv_events": False,
    "first_token_timeout_ms": 300_000,
    "progress_timeout_ms": 300_000,
    "dtype": "float32",
    "extra": json.dumps({"enable_prefix_caching": False}),
}
Reporter = Callable[[str], None]


def measure(model: str, seed: int, report: Reporter, file: Path = FILE) -> list[StageMeasurement]:
    """Measure all three stages and write the file; `report` gets each point in words."""
    stages = asyncio.run(_stages(model, seed, report))
    content = {
        "machine": machine(),
        "commit": commit(),
        "command": command_line(),
        "seed": seed,
        "stages": [asdict(stage) for stage in stages],
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    return stages


async def _stages(model: str, seed: int, report: Reporter) -> list[StageMeasurement]:
    return [await _search(seed, report), *await _llm(model, seed, report)]


async def _llm(model: str, seed: int, report: Reporter) -> list[StageMeasurement]:
    random = np.random.default_rng(seed)
    folder = model_folder(ModelSettings(path=model))
    engine = await start_engine(
        "vllm",
        _ENGINE,
        model=ModelSettings(path=folder),
        roles=[Role.REPLICA],
        worker_id="measured",
        worker_epoch=1,
    )
    name = folder.rstrip("/").rpartition("/")[2]
    about = _about(f"vLLM on cores, {name}, float32, no prefix cache", seed)

    def ask_with(prompt: int, answer: int) -> Callable[[int], Awaitable[float]]:
        async def ask(batch: int) -> float:
            return await _answers_per_s(engine, random, batch, prompt, answer)

        return ask

    try:
        await ask_with(SHORT, 4)(2)  # the first steps compile
        prefill = await _points("prefill", ask_with(PROMPT, 1), BATCHES, report)
        decode = await _points("decode", ask_with(SHORT, ANSWER), BATCHES, report)
    finally:
        await engine.close()
    return [
        StageMeasurement(
            stage="prefill", what=f"prompts of {PROMPT} tokens", unit="tokens/s",
            points=[(batch, PROMPT * rate) for batch, rate in prefill], about=about,
        ),
        StageMeasurement(
            stage="decode", what=f"answers of {ANSWER} tokens", unit="tokens/s",
            points=[(batch, ANSWER * rate) for batch, rate in decode], about=about,
        ),
    ]  # fmt: skip


async def _answers_per_s(
    engine: Engine, random: np.random.Generator, batch: int, prompt: int, answer: int
) -> float:
    """Return answers per second of a batch that starts at once."""
    sampling = Sampling(max_tokens=answer, ignore_eos=True)
    jobs = [(random.integers(100, 1_000, prompt).tolist(), sampling) for _ in range(batch)]
    began_s = time.perf_counter()
    await generate_answers(engine, jobs, at_once=batch)
    return batch / (time.perf_counter() - began_s)


async def _search(seed: int, report: Reporter) -> StageMeasurement:
    vectors, queries = overlapping(ROWS, _SEARCHES, dim=DIM, seed=seed)
    index = Index.build(vectors, seed=seed)
    engine = SearchEngine(EngineSettings(lanes=1))

    async def caller(count: int, first: int) -> None:
        for number in range(count):
            vector = queries[(first + number) % len(queries)]
            await engine.search(
                index, Query(vector=vector, k=10, top_m=TOP_M, kind=SearchKind.DECODE)
            )

    async def ask(callers: int) -> float:
        searches = max(8, _SEARCHES // callers)
        began_s = time.perf_counter()
        await asyncio.gather(*(caller(searches, number * searches) for number in range(callers)))
        return callers * searches / (time.perf_counter() - began_s)

    try:
        await ask(1)
        points = await _points("search", ask, (*BATCHES, 64), report)
    finally:
        await engine.close()
    return StageMeasurement(
        stage="search",
        what=f"callers that always ask, one thread, {ROWS} vectors of {DIM} values",
        unit="searches/s",
        points=points,
        about=_about(f"the search engine, top_m {TOP_M}", seed),
    )


async def _points(
    stage: str, ask: Callable[[int], Awaitable[float]], batches: Sequence[int], report: Reporter
) -> list[tuple[float, float]]:
    """Return the rate by batch size, the best of some repeats."""
    points = []
    for batch in batches:
        rate = max([await ask(batch) for _ in range(_REPEATS)])
        report(f"{stage}, batch {batch}: {rate:.1f} done in a second")
        points.append((float(batch), rate))
    return points


def _about(engine: str, seed: int) -> str:
    now = datetime.now(UTC).date().isoformat()
    here = machine()
    return f"{engine}; {here['cores']} cores of {here['cpu']}, seed {seed}, {now}"
