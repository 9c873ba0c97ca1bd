"""Divides work that grows with its input into time slices, between which other tasks run.

A member whose event loop is blocked for a lease is fenced, and begins at the same input again. So
no loop over records, lines or files runs from one await to the next without a bound.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
SLICE_MS = 10  # far below a lease, also with many members on a slow machine


class Slices:
    """A time slice: call `turn` between two pieces of work; cheap until the slice is over."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()

    async def turn(self) -> None:
        """Let other tasks run if this slice is over."""
        if (self._clock_s() - self._began_s) * 1000 >= SLICE_MS:
            await asyncio.sleep(0)
            self._began_s = self._clock_s()


async def in_slices(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yield the items; other tasks run between slices, and may change state in the meantime."""
    slices = Slices()
    for item in items:
        yield item
        await slices.turn()
