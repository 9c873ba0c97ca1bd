"""Answers by a JSON schema from a real engine, asked on a topic: how many keep to the schema."""

from typing import Any

from rich.progress import Progress

from infra.bench.platform.checking import checked, task
from infra.bench.platform.questions import FORM_EVERY, questions
from infra.bench.platform.run import Run
from infra.bench.platform.stacks import vllm_stack
from infra.bench.retrieval.stacks import running
from schemas.log.registry import make_codec


async def measure(count: int, seed: int, progress: Progress) -> dict[str, Any]:
    """Of so many prompts, each with the schema."""
    async with running(vllm_stack()) as stack:
        codec = make_codec(stack.settings.log)
        on = Run(stack, codec, progress, seed=seed, rate=0.0)
        asked = [each for each in questions(count * FORM_EVERY, seed) if each.has_form]
        step = await on.ask("a real engine, by a schema", asked, count, kill=False)
        wish = task(stack.settings.log, notes=on.notes, http=on.http_notes, ordered=False)
        return {**step.figures(), "checker": await checked(wish, stack.folder)}
