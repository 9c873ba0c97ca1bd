"""Runs load steps on one stack: chats alone, prompts through the log, HTTP calls, a batch.

Each step reports its duration and the kills during it. `checker.py` checks all steps together.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress

from infra.bench.faults.target_stack import urls
from infra.bench.memory import MemorySampler, growth
from infra.bench.platform.batch_load import BatchLoad
from infra.bench.platform.http_load import HttpLoad, TtftProbes
from infra.bench.platform.kills import Kills, kills_between
from infra.bench.platform.questions import LoadQuestion, draw_questions
from infra.bench.platform.stacks import in_flight
from infra.bench.platform.topic_load import TopicLoad
from infra.bench.results import percentiles
from infra.stack.launcher import Stack
from schemas.codec import Codec


@dataclass(slots=True, kw_only=True)
class LoadStep:
    """The measurements of one step of the run."""

    seconds: float = 0.0
    answers: int = 0
    ttft_ms: list[float] = field(default_factory=list)  # of chats beside the step
    probes_failed: int = 0
    killed: dict[str, int] = field(default_factory=dict)
    bridge_mib: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the step for the report."""
        return {
            "seconds": round(self.seconds, 1),
            "answers": self.answers,
            "rate_per_s": round(self.answers / self.seconds, 1) if self.seconds else None,
            "ttft_ms": percentiles(self.ttft_ms),
            "probes": len(self.ttft_ms),
            "probes_failed": self.probes_failed,
            "killed": self.killed,
            "bridge_mib_max": max(self.bridge_mib, default=None),
            "bridge_memory_growth": growth(self.bridge_mib),
            **self.extra,
        }


class PlatformRun:
    """Runs steps on a started stack, and keeps the notes for the checker."""

    def __init__(
        self, stack: Stack, codec: Codec, progress: Progress, *, seed: int, rate: float
    ) -> None:
        self.stack, self.folder = stack, stack.folder
        self._codec, self._progress = codec, progress
        self._seed, self._rate = seed, rate
        self._model = stack.settings.model.served_name
        self._kills = Kills(stack, seed)
        self.notes, self.http_notes = self.folder / "prompts.jsonl", self.folder / "http.jsonl"
        self.batches: list[dict[str, str]] = []

    async def watch(self, name: str, seconds: float, *, kill: bool) -> LoadStep:
        """Send only chats for `seconds` and measure their first tokens."""
        step, task = LoadStep(seconds=seconds), self._progress.add_task(name, total=int(seconds))
        began_s = time.monotonic()

        def done_share() -> float:
            return (time.monotonic() - began_s) / seconds

        async with self._with_probes(step, done_share if kill else None):
            while done_share() < 1:
                self._progress.update(task, completed=int(time.monotonic() - began_s))
                await asyncio.sleep(0.25)
        self._progress.update(task, completed=int(seconds))
        return step

    async def prompts(self, name: str, count: int, *, kill: bool) -> LoadStep:
        """Send `count` prompts through the log."""
        return await self.ask(name, draw_questions(count, self._seed + kill), count, kill=kill)

    async def ask(
        self, name: str, questions: Iterable[LoadQuestion], count: int, *, kill: bool
    ) -> LoadStep:
        """Send these questions through the log and wait for their answers."""
        load, step = TopicLoad(self.stack.settings.log, self.notes), LoadStep()
        on_progress = self._progress_callback(name, count)
        done_share = (lambda: len(load.answered) / count) if kill else None
        async with self._with_probes(step, done_share):
            await load.run(questions, count, self._codec, on_progress)
        step.seconds, step.answers = load.ended_s - load.began_s, len(load.answered)
        step.extra = {"sent_s": round(load.sent_s - load.began_s, 1)}
        return step

    async def http(self, name: str, count: int, *, kill: bool) -> LoadStep:
        """Send `count` questions over HTTP, as many at once as the bridges may have in flight."""
        clients = in_flight(self.stack)
        load = HttpLoad(urls(self.stack), self._model, clients, self.http_notes)
        step, on_progress = LoadStep(), self._progress_callback(name, count)
        done_share = (lambda: load.answered / count) if kill else None
        async with self._with_probes(step, done_share):
            await load.run(draw_questions(count, self._seed + 3), on_progress)
        step.seconds, step.answers = load.ended_s - load.began_s, load.answered
        step.extra = {"clients": clients, "tries_in_vain": dict(load.tries)}
        return step

    async def batch(self, name: str, count: int, *, kill: bool) -> LoadStep:
        """Send `count` lines in one batch file."""
        load, step = BatchLoad(urls(self.stack), self._model, self.folder), LoadStep()
        on_progress, completed = self._progress_callback(name, count), 0

        def progressed(lines: int) -> None:
            nonlocal completed
            completed = lines
            on_progress(lines)

        await load.create(draw_questions(count, self._seed + 2))
        async with self._with_probes(step, (lambda: completed / count) if kill else None):
            await load.wait(progressed)
        self.batches.append(load.files)
        step.seconds, step.answers = load.ended_s - load.began_s, completed
        step.extra = {"status": load.status["status"]}
        return step

    def _progress_callback(self, name: str, total: int) -> Callable[[int], None]:
        task = self._progress.add_task(name, total=total)
        return lambda count: self._progress.update(task, completed=count)

    @contextlib.asynccontextmanager
    async def _with_probes(
        self, step: LoadStep, done_share: Callable[[], float] | None
    ) -> AsyncIterator[None]:
        """Run chats, memory samples and, if `done_share` is given, kills beside the work."""
        await self.stack.wait_ready()
        probes = TtftProbes(urls(self.stack), self._model, self._rate, self._seed)
        memory, before = MemorySampler(self.stack, "bridge"), self._kills.kill_counts
        works: list[Coroutine[Any, Any, None]] = [memory.run()]
        works += [probes.run()] if self._rate else []
        works += [self._kills.run(done_share)] if done_share is not None else []
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            step.ttft_ms, step.probes_failed = probes.ttft_ms, probes.failed
            step.bridge_mib = memory.samples_mib
            step.killed = kills_between(self._kills.kill_counts, before)
