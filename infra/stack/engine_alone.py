"""Runs one engine alone, without log, peers and transfers, as the reference for a deployment.

Any deployment of such engines has to give the same answers. The caller starts the engine
(`engine_source.py`) and closes it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from schemas.errors import EngineFailed
from schemas.records import Sampling, WorkPhase
from streams.log.clock import wall_ms
from workers.llm.engine import Engine, Job

_DEADLINE_MS = 3_600_000
_NUMBERS = itertools.count()  # an engine accepts a request id only once


@dataclass(slots=True)
class LoneAnswer:
    """The answer of one engine: its token ids and text."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""


async def generate_answers(
    engine: Engine,
    prompts: Sequence[tuple[Sequence[int], Sampling]],
    *,
    at_once: int,
    on_answer: Callable[[], None] = lambda: None,
    adapters: Sequence[str] = (),
) -> list[LoneAnswer]:
    """Generate answers to these prompts, `at_once` at a time; call `on_answer` after each.

    `adapters` has the LoRA adapter of each prompt, "" for none; without it, none has one. Raises
    EngineFailed if the engine reports an error.
    """
    results = [LoneAnswer() for _ in prompts]
    coming = zip(prompts, adapters or [""] * len(prompts), results, strict=True)
    running: dict[str, LoneAnswer] = {}
    while True:
        for request, adapter, answer in itertools.islice(coming, at_once - len(running)):
            running[name := f"alone-{next(_NUMBERS)}"] = answer
            engine.add(_job(name, *request, adapter))
        if not running:
            return results
        for output in await engine.outputs():
            if output.error is not None:
                raise EngineFailed(f"the engine alone: {output.error.message}")
            answer = running[output.request_id]
            answer.token_ids += output.token_ids
            answer.text += output.text
            if output.finish_reason:
                del running[output.request_id]
                on_answer()


def _job(name: str, prompt_tokens: Sequence[int], sampling: Sampling, adapter: str) -> Job:
    return Job(
        request_id=name,
        phase=WorkPhase.DECODE,
        prompt_tokens=prompt_tokens,
        sampling=sampling,
        deadline_ms=wall_ms() + _DEADLINE_MS,
        adapter=adapter,
    )
