"""A heap of deadlines: the earliest one, and the items whose deadline has passed. Pure.

An item that ends earlier stays in the heap. It is skipped when it reaches the front. Such stale
entries are swept out before they outnumber the pending ones.
"""

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item")

NEVER_MS = math.inf
_STALE_MIN = 64  # fewer stale entries are not worth a sweep


class Deadlines(Generic[Item]):
    """Deadlines of items; `is_pending` returns whether an item has not ended yet."""

    def __init__(self, is_pending: Callable[[Item], bool]) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._is_pending = is_pending
        self._serial = 0  # items with equal deadlines stay in the order of `add`
        self._swept_at = _STALE_MIN

    def __len__(self) -> int:
        """Return the number of deadlines, including stale ones that were not swept out."""
        return len(self._heap)

    def add(self, deadline_ms: float, item: Item) -> None:
        """Add an item's deadline, unless it is `NEVER_MS`."""
        if deadline_ms == NEVER_MS:
            return
        if len(self._heap) >= self._swept_at:
            self._heap = [entry for entry in self._heap if self._is_pending(entry[2])]
            heapify(self._heap)
            self._swept_at = 2 * len(self._heap) + _STALE_MIN
        self._serial += 1
        heappush(self._heap, (deadline_ms, self._serial, item))

    def next_ms(self) -> float:
        """Return the earliest deadline, or `NEVER_MS` if there is none."""
        heap = self._heap
        while heap and not self._is_pending(heap[0][2]):
            heappop(heap)
        return heap[0][0] if heap else NEVER_MS

    def pop_expired(self, now_ms: float) -> Iterator[Item]:
        """Yield each item whose deadline has passed once, earliest first."""
        while self.next_ms() <= now_ms:
            yield heappop(self._heap)[2]
