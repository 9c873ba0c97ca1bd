"""Runs load steps on one stack: chats alone, prompts through the log, HTTP calls, a batch.

Each step returns its duration, its answers and the kills during it. `checker.py` checks all steps
together.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Self

from infra.bench.benchmark import counting
from infra.bench.faults.kill_schedule import KillsInTurn
from infra.bench.meters import MemorySampler, growth
from infra.bench.platform.loads import BatchLoad, HttpLoad, TimedLoad, TopicLoad, TtftProbes
from infra.bench.platform.questions import LoadQuestion, draw_questions
from infra.bench.results import percentiles, ratio
from infra.bench.stacks import urls
from infra.stack.launcher import Stack
from schemas.codec import Codec
from streams.log.registry import make_codec

RUNNING_MAX = 64  # answers at once on each worker that decodes
Figures = dict[str, Any]


class PlatformRun:
    """Runs steps on a started stack, and keeps the notes for the checker."""

    def __init__(self, stack: Stack, codec: Codec, *, seed: int, rate: float) -> None:
        self.stack, self._codec = stack, codec
        self._seed, self._rate = seed, rate
        self._urls, self._model = urls(stack), stack.settings.model.served_name
        self._kills = KillsInTurn(stack, seed)
        self.notes, self.http_notes = stack.folder / "prompts.jsonl", stack.folder / "http.jsonl"
        self.batches: list[dict[str, str]] = []

    @classmethod
    async def create(cls, stack: Stack, *, seed: int, rate: float) -> Self:
        """Return a run that sends `rate` chats per second beside its steps."""
        codec = await asyncio.to_thread(make_codec, stack.settings.log)
        return cls(stack, codec, seed=seed, rate=rate)

    async def watch(self, name: str, seconds: float, *, kill: bool) -> Figures:
        """Send only chats for `seconds` and measure their first tokens."""
        progress, began_s = counting(name, int(seconds)), time.monotonic()

        def done_share() -> float:
            return (time.monotonic() - began_s) / seconds

        async with self._beside(done_share if kill else None) as figures:
            while done_share() < 1:
                progress(completed=int(time.monotonic() - began_s))
                await asyncio.sleep(0.25)
        return {"seconds": round(seconds, 1), "answers": 0, "rate_per_s": 0.0, **figures}

    async def prompts(self, name: str, count: int, *, kill: bool) -> Figures:
        """Send `count` prompts through the log."""
        return await self.ask(name, draw_questions(count, self._seed + kill), count, kill=kill)

    async def ask(
        self, name: str, questions: Iterable[LoadQuestion], count: int, *, kill: bool
    ) -> Figures:
        """Send these questions through the log and wait for their answers."""
        load, progress = TopicLoad(self.stack.settings.log, self.notes), _progress(name, count)
        work = load.run(questions, count, self._codec, progress)
        figures = await self._measure(load, work, count, kill=kill)
        return {**figures, "sent_s": round(load.sent_s - load.began_s, 1)}

    async def http(self, name: str, count: int, *, kill: bool) -> Figures:
        """Send `count` questions over HTTP, as many at once as the bridges may have in flight."""
        plan, share = self.stack.plan, self.stack.settings.bridge.share
        clients = int((plan.decode + plan.replica) * RUNNING_MAX * share)
        load = HttpLoad(self._urls, self._model, clients, self.http_notes)
        work = load.run(draw_questions(count, self._seed + 3), _progress(name, count))
        figures = await self._measure(load, work, count, kill=kill)
        return {**figures, "clients": clients, "tries_in_vain": dict(load.tries)}

    async def batch(self, name: str, count: int, *, kill: bool) -> Figures:
        """Send `count` lines in one batch file."""
        load = BatchLoad(self._urls, self._model, self.stack.folder)
        await load.create(draw_questions(count, self._seed + 2))
        figures = await self._measure(load, load.wait(_progress(name, count)), count, kill=kill)
        self.batches.append(load.files)
        return {**figures, "status": load.status["status"]}

    async def _measure(
        self, load: TimedLoad, work: Coroutine[Any, Any, None], count: int, *, kill: bool
    ) -> Figures:
        """Run the load beside chats and, if `kill`, kills; return the figures of the step."""
        async with self._beside((lambda: load.answers / count) if kill else None) as figures:
            await work
        seconds = load.ended_s - load.began_s
        rate = ratio(load.answers, seconds)
        rates = {"answers": load.answers, "rate_per_s": None if rate is None else round(rate, 1)}
        return {"seconds": round(seconds, 1), **rates, **figures}

    @contextlib.asynccontextmanager
    async def _beside(self, done_share: Callable[[], float] | None) -> AsyncIterator[Figures]:
        """Run chats, memory samples and, if `done_share` is given, kills until the block ends, and
        then fill the yielded figures."""
        await self.stack.wait_ready()
        probes = TtftProbes(self._urls, self._model, self._rate, self._seed)
        memory, before = MemorySampler(self.stack, "bridge"), self._kills.kill_counts
        works: list[Coroutine[Any, Any, None]] = [memory.run()]
        works += [probes.run()] if self._rate else []
        works += [self._kills.run(done_share)] if done_share is not None else []
        tasks, figures = [asyncio.create_task(work) for work in works], Figures()
        try:
            yield figures
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        figures |= {
            "ttft_ms": percentiles(probes.ttft_ms),
            "probes": len(probes.ttft_ms),
            "probes_failed": probes.failed,
            "killed": dict(Counter(self._kills.kill_counts) - Counter(before)),
            "bridge_mib_max": max(memory.samples_mib, default=None),
            "bridge_memory_growth": growth(memory.samples_mib),
        }


def _progress(name: str, count: int) -> Callable[[int], None]:
    progress = counting(name, count)
    return lambda answers: progress(completed=answers)
