"""When a host took a core away from this machine: beside what is measured, one process per core.

A virtual machine's core stops now and then for milliseconds; no thread on it waits in the system's
queue meanwhile, and none uses time. Nothing within the process tells that from a lock which another
thread holds. So a process that is bound to each core does nothing but sleep for a millisecond: what
it was late by, without its own time in the queue, was taken from that core. Linux only.
"""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SLEEP_S = 0.001
_LEAST_S = 0.001  # that is told
_READY = b"ready\n"
Gap = tuple[float, float]  # first and last moment, seconds as of `time.perf_counter`


class StealTime:
    """Holds the time stolen from each core; complete when its block ends."""

    def __init__(self) -> None:
        self.gaps: list[list[Gap]] = []  # by core

    def within(self, first_s: float, last_s: float) -> float:
        """Seconds that the core which lost most lost between two moments."""
        return max(
            (
                sum(max(0.0, min(last_s, end) - max(first_s, begin)) for begin, end in gaps)
                for gaps in self.gaps
            ),
            default=0.0,
        )


@asynccontextmanager
async def watch_steal() -> AsyncIterator[StealTime]:
    """Watch all cores of this process until the block ends."""
    steal, cores = StealTime(), sorted(os.sched_getaffinity(0))
    lookers = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, str(core), stdout=PIPE)
        for core in cores
    ]
    readers = list[asyncio.Task[None]]()
    try:
        for looker in lookers:
            assert looker.stdout is not None, "it is a pipe"
            assert await looker.stdout.readline() == _READY
            gaps = list[Gap]()
            readers.append(asyncio.create_task(_read(looker.stdout, gaps)))
            steal.gaps.append(gaps)
        yield steal
    finally:
        for looker in lookers:
            looker.kill()
        await asyncio.gather(*readers, *(looker.wait() for looker in lookers))


async def _read(lines: asyncio.StreamReader, gaps: list[Gap]) -> None:
    async for line in lines:
        if line.endswith(b"\n"):  # and not cut off by the end
            begin, end = map(float, line.split())
            gaps.append((begin, end))


def _look(core: int) -> None:
    """Write each gap of the core to standard output, until killed."""
    os.sched_setaffinity(0, {core})
    counted = os.open("/proc/self/schedstat", os.O_RDONLY)

    def waited_s() -> float:
        return int(os.pread(counted, 100, 0).split()[1]) / 1e9

    def both() -> tuple[float, float]:
        """The time and the wait so far, of one moment: neither wait nor stop lies between them."""
        while True:
            queued_s, now_s = waited_s(), time.perf_counter()
            if waited_s() == queued_s:
                return now_s, queued_s

    before_s, queued_s = both()
    os.write(1, _READY)
    while True:
        time.sleep(_SLEEP_S)
        now_s, now_queued_s = both()
        gap_s = now_s - before_s - _SLEEP_S - (now_queued_s - queued_s)
        if gap_s > _LEAST_S:
            os.write(1, f"{now_s - gap_s:.6f} {now_s:.6f}\n".encode())
        before_s, queued_s = now_s, now_queued_s


if __name__ == "__main__":
    _look(int(sys.argv[1]))
