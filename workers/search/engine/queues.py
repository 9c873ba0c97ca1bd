"""Where searches wait: by slack, first in first out, and by deadline. The scheduler's containers.

What has left one of them by another way (cancelled, admitted, dropped) is skipped when it comes to
the front, and swept out before it is more than what waits.

Slack is compared exactly although the time of an extend changes: searches with the same number of
extends keep their order by deadline whatever that time is, so there is one heap for each number,
and only the heaps' heads are compared.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from workers.search.index.kinds import Kind

NEVER_MS = math.inf
_STALE_MIN = 64  # fewer are not worth a sweep

_Entry = tuple[float, int, "QueuedSearch"]


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedSearch:
    """A search that waits; `search` is the caller's."""

    kind: Kind
    extends: int  # expected in all
    arrived_ms: float
    deadline_ms: float = NEVER_MS
    search: Any = None
    waits: bool = False  # in a scheduler

    def slack_ms(self, now_ms: float, ms_per_extend: float) -> float:
        """Time that may pass before the search has to start."""
        return self.deadline_ms - now_ms - self.extends * ms_per_extend


class BySlack:
    """The search that has to start first comes first."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[_Entry]] = {}  # by extends
        self._serial = 0

    def add(self, item: QueuedSearch) -> None:
        """It waits from now on."""
        self._serial += 1
        heappush(self._heaps.setdefault(item.extends, []), (item.deadline_ms, self._serial, item))

    def head(self, ms_per_extend: float) -> QueuedSearch | None:
        """The search with the least slack."""
        best, least = None, NEVER_MS
        for extends in list(self._heaps):
            heap = self._heaps[extends]
            while heap and not heap[0][2].waits:
                heappop(heap)
            if not heap:
                del self._heaps[extends]
                continue
            latest_ms = heap[0][0] - extends * ms_per_extend
            if best is None or latest_ms < least:
                best, least = heap[0][2], latest_ms
        return best

    def pop(self, head: QueuedSearch) -> None:
        """Take out what `head` has just returned."""
        heap = self._heaps[head.extends]
        heappop(heap)
        if not heap:
            del self._heaps[head.extends]

    def sweep(self) -> None:
        """Forget what does not wait any more."""
        swept = {n: [e for e in heap if e[2].waits] for n, heap in self._heaps.items()}
        self._heaps = {extends: heap for extends, heap in swept.items() if heap}
        for heap in self._heaps.values():
            heapify(heap)

    def __iter__(self) -> Iterator[QueuedSearch]:
        for heap in self._heaps.values():
            yield from (entry[2] for entry in heap if entry[2].waits)


class InOrder(deque[QueuedSearch]):
    """First in, first out."""

    def first(self) -> QueuedSearch | None:
        """The search at the front, which stays there."""
        while self and not self[0].waits:
            self.popleft()
        return self[0] if self else None

    def sweep(self) -> None:
        """Forget what does not wait any more."""
        kept = [item for item in self if item.waits]
        self.clear()
        self.extend(kept)


class Deadlines:
    """When searches have to end; those without a deadline are not kept.

    `concerns` says whether a search is still to be ended.
    """

    def __init__(self, concerns: Callable[[Any], bool]) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._concerns = concerns
        self._serial = 0
        self._swept_at = _STALE_MIN

    def add(self, item: QueuedSearch) -> None:
        """Keep a search's deadline, if it has one."""
        if item.deadline_ms == NEVER_MS:
            return
        if len(self._heap) >= self._swept_at:
            self._heap = [entry for entry in self._heap if self._concerns(entry[2])]
            heapify(self._heap)
            self._swept_at = 2 * len(self._heap) + _STALE_MIN
        self._serial += 1
        heappush(self._heap, (item.deadline_ms, self._serial, item))

    def next_ms(self) -> float:
        """The earliest deadline."""
        heap = self._heap
        while heap and not self._concerns(heap[0][2]):
            heappop(heap)
        return heap[0][0] if heap else NEVER_MS

    def passed(self, now_ms: float) -> Iterator[Any]:
        """Searches whose deadline has passed, earliest first; each once."""
        while self.next_ms() <= now_ms:
            yield heappop(self._heap)[2]
