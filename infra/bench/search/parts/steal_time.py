"""Detects when the host takes a core from this virtual machine, with one process per core.

A virtual machine's core stops now and then for milliseconds. Meanwhile no thread on it waits in the
kernel's run queue, and none uses CPU time. Within a process this looks like a lock that another
thread holds. So a process that is bound to each core only sleeps for a millisecond again and again.
Its delay, less its own time in the run queue, was taken from that core. Linux only.
"""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SLEEP_S = 0.001
_LEAST_S = 0.001  # shorter gaps are not reported
_READY = b"ready\n"
Gap = tuple[float, float]  # begin and end, seconds of `time.perf_counter`


class StealTime:
    """The time stolen from each core; complete when its block has ended."""

    def __init__(self) -> None:
        self.gaps: list[list[Gap]] = []  # by core

    def within(self, first_s: float, last_s: float) -> float:
        """Return the seconds stolen between two times from the core that lost most."""
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
        if line.endswith(b"\n"):  # not cut off by the kill
            begin, end = map(float, line.split())
            gaps.append((begin, end))


def _look(core: int) -> None:
    """Write each gap of the core to standard output, until killed."""
    os.sched_setaffinity(0, {core})
    counted = os.open("/proc/self/schedstat", os.O_RDONLY)

    def waited_s() -> float:
        return int(os.pread(counted, 100, 0).split()[1]) / 1e9

    def both() -> tuple[float, float]:
        """Return the time and the total wait of one moment, with no wait or stop between them."""
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
