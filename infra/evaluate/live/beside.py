"""Figures 2 and 7 on a real engine: what one prompt costs the answers beside it, on this machine.

As in the script of the PPD paper's authors a batch of answers has one context, which the engine's
prefix cache holds. Into it comes a prompt, whole (full) or behind the same context (append), with
as many new tokens. Shown is how much longer steps take while the prompt is computed, and the mean
time per token of the whole answers. Called by `trivium evaluate interference`.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infra.stack.engine_source import start_engine
from schemas.errors import EngineFailed
from schemas.log.clock import wall_ms
from schemas.records import Role, Sampling, WorkPhase
from schemas.settings import ModelSettings
from workers.llm.engine import Engine, Job
from workers.models.folder import model_folder

BATCHES = (1, 8, 32)
CONTEXTS = (256, 2_048, 7_680)  # tokens; the model takes 8 192
NEW_TOKENS = 256
ANSWER_TOKENS = 24
SETTLED = 4  # tokens of each answer before the prompt comes
_DEADLINE_MS = 3_600_000
_ENGINE = {
    "dtype": "float32",
    "kv_cache_bytes": 1 << 30,
    "kv_events": False,
    "first_token_timeout_ms": 300_000,
    "progress_timeout_ms": 300_000,
    "extra": json.dumps({"enable_prefix_caching": True}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One batch with one context; times in ms, slow-downs in percent."""

    batch: int
    context_tokens: int
    alone_ms: float  # mean time per token without a prompt
    full_steps: float  # slow-down of steps while the prompt is computed
    append_steps: float
    full_answers: float  # of the mean time per token of the answers
    append_answers: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Mean times per token: of whole answers, and while the prompt was computed."""

    answers_ms: float
    steps_ms: float


async def measure(model: str, seed: int, told: Callable[[Beside], None]) -> list[Beside]:
    """Every batch and context; `told` hears of each."""
    engine = await start_engine(
        "vllm",
        _ENGINE,
        model=ModelSettings(path=model_folder(ModelSettings(path=model))),
        roles=[Role.REPLICA],
        worker_id="measured",
        worker_epoch=1,
    )
    found = []
    try:
        batches = _Batches(engine, np.random.default_rng(seed))
        for context_tokens in CONTEXTS:
            context = batches.tokens(context_tokens)
            await batches.run(1, context, None)  # the cache holds it then
            for batch in BATCHES:
                found.append(await _measured(batches, batch, context))
                told(found[-1])
    finally:
        await engine.close()
    return found


async def _measured(batches: "_Batches", batch: int, context: Sequence[int]) -> Beside:
    alone = await batches.run(batch, context, None)
    full = await batches.run(batch, context, batches.tokens(NEW_TOKENS))
    append = await batches.run(batch, context, [*context, *batches.tokens(NEW_TOKENS)])
    base_ms = alone.answers_ms
    return Beside(
        batch=batch,
        context_tokens=len(context),
        alone_ms=base_ms,
        full_steps=100 * (full.steps_ms / base_ms - 1),
        append_steps=100 * (append.steps_ms / base_ms - 1),
        full_answers=100 * (full.answers_ms / base_ms - 1),
        append_answers=100 * (append.answers_ms / base_ms - 1),
    )


class _Batches:
    """Runs batches on one engine."""

    def __init__(self, engine: Engine, random: np.random.Generator) -> None:
        self._engine, self._random = engine, random
        self._names = 0

    def tokens(self, count: int) -> list[int]:
        """That nobody has asked before."""
        found: list[int] = self._random.integers(100, 40_000, count).tolist()
        return found

    async def run(self, batch: int, context: Sequence[int], prompt: Sequence[int] | None) -> _Run:
        """So many answers behind the context; the prompt comes when all of them are under way."""
        at_s: dict[str, list[float]] = {
            self._ask([*context, *self.tokens(SETTLED)], ANSWER_TOKENS): [] for _ in range(batch)
        }
        asked, began_s, steps_ms, running = "", 0.0, 0.0, set(at_s)
        while running:
            if prompt is not None and not asked and _all_have(at_s, SETTLED):
                asked, began_s = self._ask(prompt, 1), time.perf_counter()
            for output in await self._engine.outputs():
                now_s = time.perf_counter()
                if output.error is not None:
                    raise EngineFailed(f"the engine alone: {output.error.message}")
                if output.request_id == asked:
                    steps_ms = 1e3 * (now_s - began_s) / max(1, _steps(at_s, began_s))
                    continue
                at_s[output.request_id] += [now_s] * len(output.token_ids)
                if output.finish_reason:
                    running.discard(output.request_id)
        each_ms = [1e3 * (at[-1] - at[0]) / (len(at) - 1) for at in at_s.values()]
        return _Run(answers_ms=float(np.mean(each_ms)), steps_ms=steps_ms)

    def _ask(self, prompt: Sequence[int], answer_tokens: int) -> str:
        self._names += 1
        name = f"beside-{self._names}"
        self._engine.add(
            Job(
                request_id=name,
                phase=WorkPhase.DECODE,
                prompt_tokens=prompt,
                sampling=Sampling(max_tokens=answer_tokens, ignore_eos=True),
                deadline_ms=wall_ms() + _DEADLINE_MS,
            )
        )
        return name


def _all_have(at_s: dict[str, list[float]], tokens: int) -> bool:
    return all(len(at) >= tokens for at in at_s.values())


def _steps(at_s: dict[str, list[float]], since_s: float) -> int:
    """Of the batch since then, by the answer that got most."""
    return max(sum(each > since_s for each in at) for at in at_s.values())
