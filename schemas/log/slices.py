"""Work that grows with its input, in slices: between two of them others get their turn.

A member whose loop stands still for a lease is fenced, and begins at the same input again. So no
loop over records, lines or files runs from one await to the next without a bound.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
SLICE_MS = 10  # of a lease of some seconds, with room for many members on a slow machine


class Slices:
    """`turn` between two pieces of work; it costs nothing until a slice is over."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()

    async def turn(self) -> None:
        """Let others go on, if this slice is over."""
        if (self._clock_s() - self._began_s) * 1000 >= SLICE_MS:
            await asyncio.sleep(0)
            self._began_s = self._clock_s()


async def in_slices(items: Iterable[Item]) -> AsyncIterator[Item]:
    """The same items; who comes first in the next slice may find what others did meanwhile."""
    slices = Slices()
    for item in items:
        yield item
        await slices.turn()
