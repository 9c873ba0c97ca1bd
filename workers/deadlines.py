"""When things have to end: the earliest deadline, and those that have passed. Pure.

Whatever ends in another way is not taken out: it is skipped when it comes to the front, and swept
out before there is more of it than of what still has to end.
"""

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item")

NEVER_MS = math.inf
_STALE_MIN = 64  # fewer are not worth a sweep


class Deadlines(Generic[Item]):
    """Deadlines of any number of items; `is_pending` says whether one still has to end."""

    def __init__(self, is_pending: Callable[[Item], bool]) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._is_pending = is_pending
        self._serial = 0  # equal deadlines are kept in the order of their coming
        self._swept_at = _STALE_MIN

    def __len__(self) -> int:
        """Return the number of deadlines, with stale ones that were not swept out."""
        return len(self._heap)

    def add(self, deadline_ms: float, item: Item) -> None:
        """Keep a deadline, unless it is `NEVER_MS`."""
        if deadline_ms == NEVER_MS:
            return
        if len(self._heap) >= self._swept_at:
            self._heap = [entry for entry in self._heap if self._is_pending(entry[2])]
            heapify(self._heap)
            self._swept_at = 2 * len(self._heap) + _STALE_MIN
        self._serial += 1
        heappush(self._heap, (deadline_ms, self._serial, item))

    def next_ms(self) -> float:
        """The earliest deadline; `NEVER_MS` where there is none."""
        heap = self._heap
        while heap and not self._is_pending(heap[0][2]):
            heappop(heap)
        return heap[0][0] if heap else NEVER_MS

    def pop_expired(self, now_ms: float) -> Iterator[Item]:
        """Items whose deadline has passed, earliest first; each once."""
        while self.next_ms() <= now_ms:
            yield heappop(self._heap)[2]
