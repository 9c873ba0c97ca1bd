"""Measures how late an event loop is during an operation, and how much of that this process caused.

On a shared machine a loop is also late if another process has the core: the core of the loop, or of
a thread that holds the GIL. So three times are measured with each delay: how long threads that
share the GIL were runnable without a core, by the kernel's count; how long the host took a core
away (`steal_time.py`); and how much CPU time these threads used. The loop was held up for at most
its delay less the larger of the first (the loop's own plus the longest of the other threads) and
the second, and for at most the third. Linux only.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from infra.bench.results import percentile
from infra.bench.search.parts.steal_time import watch_steal

TICK_S = 0.001
_LANES = "search"  # threads of an engine, which never take the GIL


class Lateness:
    """Delays of a loop, sampled every millisecond, in ms. Complete when the block has ended."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.held_ms: list[float] = []
        self.stolen_ms: list[float] = []

    def figures(self) -> dict[str, Any]:
        """Return the maximum and the 99.9th percentile of each."""
        figures = {}
        for name in ("late", "held", "stolen"):
            values = getattr(self, f"{name}_ms")
            figures[f"{name}_ms"] = round(max(values, default=0.0), 2)
            figures[f"{name}_ms_p99.9"] = round(percentile(values, 99.9) or 0.0, 2)
        return figures


class _Look(NamedTuple):
    """The times of one sample of the loop, in seconds."""

    began_s: float
    ended_s: float
    waited_s: float  # for a core
    used_s: float

    def late_and_held(self, stolen_s: float) -> tuple[float, float]:
        """Return how late the loop was, and how long it was held up at most, in s."""
        late_s = self.ended_s - self.began_s - TICK_S
        others_s = max(self.waited_s, stolen_s)  # a thread may wait for a stolen core
        return late_s, max(0.0, min(late_s - others_s, self.used_s))


@asynccontextmanager
async def watch_lateness() -> AsyncIterator[Lateness]:
    """Measure the lateness of the running loop until the block ends."""
    lateness, looks = Lateness(), list[_Look]()
    async with watch_steal() as steal:
        task = asyncio.create_task(_watch(looks))
        await asyncio.sleep(0)
        try:
            yield lateness
        finally:
            await asyncio.sleep(TICK_S)  # so that the last delay is sampled
            task.cancel()
    for look in looks:
        stolen_s = steal.within(look.began_s, look.ended_s)
        late_s, held_s = look.late_and_held(stolen_s)
        lateness.late_ms.append(1_000 * late_s)
        lateness.held_ms.append(1_000 * held_s)
        lateness.stolen_ms.append(1_000 * stolen_s)


async def _watch(looks: list[_Look]) -> None:
    own_id, files = threading.get_native_id(), _Files()
    try:
        while True:
            began_s, before = time.perf_counter(), files.times()
            await asyncio.sleep(TICK_S)
            ended_s, after = time.perf_counter(), files.times()
            deltas = {
                thread: (now[0] - was[0], now[1] - was[1])
                for thread, now in after.items()
                if (was := before.get(thread, (0.0, 0.0)))
            }
            waited_s = deltas[own_id][1] + max(
                (w for t, (_, w) in deltas.items() if t != own_id), default=0
            )
            looks.append(
                _Look(began_s, ended_s, waited_s, sum(used for used, _ in deltas.values()))
            )
    finally:
        files.close()


class _Files:
    """Reads the kernel's schedule statistics of the threads that share the GIL."""

    def __init__(self) -> None:
        self._files = dict[int, int]()

    def times(self) -> dict[int, tuple[float, float]]:
        """Return CPU time and runnable time without a core in s, by thread."""
        cpu_times = {}
        for thread in threading.enumerate():
            number = thread.native_id
            if number is None or thread.name.startswith(_LANES):
                continue
            try:
                if number not in self._files:
                    path = f"/proc/self/task/{number}/schedstat"
                    self._files[number] = os.open(path, os.O_RDONLY)
                used, waited, _ = os.pread(self._files[number], 100, 0).split()
            except OSError:  # the thread has just ended
                continue
            cpu_times[number] = int(used) / 1e9, int(waited) / 1e9
        return cpu_times

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
