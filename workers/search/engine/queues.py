"""Where searches wait: by slack, and first in first out. The scheduler's containers.

What has left one of them by another way (cancelled, admitted, dropped) is skipped when it comes to
the front, and swept out before it is more than what waits.

Slack is compared exactly although the time of an extend changes: searches with the same number of
extends keep their order by deadline whatever that time is, so there is one heap for each number,
and only the heaps' heads are compared.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from workers.deadlines import NEVER_MS
from workers.search.index.kinds import Kind

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
