"""Counts how many answers of a real engine to prompts with a JSON schema keep to the schema."""

from typing import Any

from rich.progress import Progress

from infra.bench.platform.checking import make_task, run_checker
from infra.bench.platform.questions import FORM_EVERY, draw_questions
from infra.bench.platform.run import PlatformRun
from infra.bench.platform.stacks import vllm_stack
from infra.bench.retrieval.stacks import running
from streams.log.registry import make_codec


async def measure(count: int, seed: int, progress: Progress) -> dict[str, Any]:
    """Send `count` prompts with the schema to a real engine and return the checker's findings."""
    async with running(vllm_stack()) as stack:
        codec = make_codec(stack.settings.log)
        bench = PlatformRun(stack, codec, progress, seed=seed, rate=0.0)
        form_questions = [
            question for question in draw_questions(count * FORM_EVERY, seed) if question.has_form
        ]
        step = await bench.ask("a real engine, by a schema", form_questions, count, kill=False)
        checker_task = make_task(
            stack.settings.log, notes=bench.notes, http=bench.http_notes, ordered=False
        )
        return {**step.figures(), "checker": await run_checker(checker_task, stack.folder)}
