"""The scheduler's queues of waiting searches: by slack, and first in, first out.

A search that was cancelled, admitted or dropped stays in its queue. It is skipped at the front, and
a sweep removes such searches before they outnumber the waiting ones.

Slack is compared exactly although the time of an extend changes: searches with the same number of
extends keep their order by deadline for any such time. So there is one heap for each number of
extends, and only the heads of the heaps are compared.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from workers.vector.index.kinds import SearchKind

NEVER_MS = math.inf  # the deadline of a search without one
_SWEPT_MIN = 64  # searches that no longer wait; fewer are not worth a sweep
_PREFILL, _DECODE = SearchKind.PREFILL, SearchKind.DECODE  # looked up often

_Entry = tuple[float, int, "QueuedSearch"]


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedSearch:
    """A search that waits; `search` is the caller's object."""

    kind: SearchKind
    extends: int  # expected total number
    arrived_ms: float
    deadline_ms: float = NEVER_MS
    search: Any = None
    waits: bool = False  # whether it is in a scheduler's queue

    def slack_ms(self, now_ms: float, ms_per_extend: float) -> float:
        """Return the time that may pass before the search has to start."""
        return self.deadline_ms - now_ms - self.extends * ms_per_extend


class SlackQueue:
    """A queue whose head is the search with the least slack."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[_Entry]] = {}  # by number of extends
        self._serial = 0

    def add(self, item: QueuedSearch) -> None:
        """Put a search into the heap of its number of extends."""
        self._serial += 1
        heappush(self._heaps.setdefault(item.extends, []), (item.deadline_ms, self._serial, item))

    def head(self, ms_per_extend: float) -> QueuedSearch | None:
        """Return the search with the least slack, None if no search waits."""
        best, least_ms, emptied = None, NEVER_MS, False
        for extends, heap in self._heaps.items():
            while heap and not heap[0][2].waits:
                heappop(heap)
            if not heap:
                emptied = True
                continue
            latest_ms = heap[0][0] - extends * ms_per_extend
            if best is None or latest_ms < least_ms:
                best, least_ms = heap[0][2], latest_ms
        if emptied:
            self._heaps = {extends: heap for extends, heap in self._heaps.items() if heap}
        return best

    def pop(self, head: QueuedSearch) -> None:
        """Remove the search that `head` has just returned."""
        heap = self._heaps[head.extends]
        heappop(heap)
        if not heap:
            del self._heaps[head.extends]

    def sweep(self) -> None:
        """Remove the searches that no longer wait."""
        swept = {n: [e for e in heap if e[2].waits] for n, heap in self._heaps.items()}
        self._heaps = {extends: heap for extends, heap in swept.items() if heap}
        for heap in self._heaps.values():
            heapify(heap)

    def __iter__(self) -> Iterator[QueuedSearch]:
        for heap in self._heaps.values():
            yield from (entry[2] for entry in heap if entry[2].waits)


class Fifo(deque[QueuedSearch]):
    """A queue in order of arrival; searches that no longer wait are skipped."""

    def first(self) -> QueuedSearch | None:
        """Return the search at the front without removing it."""
        while self and not self[0].waits:
            self.popleft()
        return self[0] if self else None

    def sweep(self) -> None:
        """Remove the searches that no longer wait."""
        waiting = [item for item in self if item.waits]
        self.clear()
        self.extend(waiting)


class SearchQueues:
    """All waiting searches of one engine, each in the queue of its class.

    Prefill searches that can no longer meet their deadline wait in `late`.
    """

    def __init__(self) -> None:
        self.prefill, self.late, self.decode, self.link = SlackQueue(), Fifo(), Fifo(), Fifo()
        self.counts = dict.fromkeys(SearchKind, 0)
        self._deadlines: list[_Entry] = []  # a heap; of searches that have one
        self._serial = 0  # searches with equal deadlines stay in order of arrival
        self.total = 0  # searches
        self._cancelled = 0  # since the last sweep

    def __len__(self) -> int:
        return self.total

    def add(self, item: QueuedSearch) -> None:
        """Put a search into the queue of its class."""
        kind = item.kind
        self.counts[kind] += 1
        self.total += 1
        item.waits = True
        if kind is _PREFILL:
            self.prefill.add(item)
        else:
            (self.decode if kind is _DECODE else self.link).append(item)
        if item.deadline_ms != NEVER_MS:
            if len(self._deadlines) > 2 * self.total + _SWEPT_MIN:
                self._deadlines = [entry for entry in self._deadlines if entry[2].waits]
                heapify(self._deadlines)
            self._serial += 1
            heappush(self._deadlines, (item.deadline_ms, self._serial, item))

    def next_deadline_ms(self) -> float:
        """Return the earliest deadline of a waiting search, or NEVER_MS."""
        heap = self._deadlines
        while heap and not heap[0][2].waits:
            heappop(heap)
        return heap[0][0] if heap else NEVER_MS

    def pop_expired(self, now_ms: float) -> Iterator[QueuedSearch]:
        """Yield the waiting searches whose deadline has passed, earliest first; each once."""
        while self.next_deadline_ms() <= now_ms:
            yield heappop(self._deadlines)[2]

    def mark_left(self, item: QueuedSearch) -> None:
        """Mark a search as no longer waiting; callers remove it, or it is skipped later."""
        assert item.waits
        item.waits = False
        self.counts[item.kind] -= 1
        self.total -= 1

    def take_prefill(self, ms_per_extend: float) -> QueuedSearch | None:
        """Remove and return the prefill search with the least slack, without those in `late`."""
        item = self.prefill.head(ms_per_extend)
        if item is not None:
            self.prefill.pop(item)
            self.mark_left(item)
        return item

    def take(self, queue: Fifo, limit: int, target: list[QueuedSearch]) -> int:
        """Move the first `limit` searches of a queue to `target`; return the number moved."""
        before = len(target)
        last = before + limit
        while queue and len(target) < last:
            item = queue.popleft()
            if item.waits:
                item.waits = False
                target.append(item)
        if taken_count := len(target) - before:
            self.counts[target[-1].kind] -= taken_count
            self.total -= taken_count
        return taken_count

    def oldest_ms(self) -> tuple[float, float]:
        """Return when the oldest prefill search and the oldest of all arrived; NEVER_MS: none."""
        late = (item for item in self.late if item.waits)
        prefill_ms = min((item.arrived_ms for item in (*self.prefill, *late)), default=NEVER_MS)
        heads = (queue.first() for queue in (self.decode, self.link))
        return prefill_ms, min((prefill_ms, *(head.arrived_ms for head in heads if head)))

    def cancel(self, item: QueuedSearch) -> None:
        """Cancel a search that waits in a queue."""
        self.mark_left(item)
        self._cancelled += 1
        if self._cancelled > len(self) + _SWEPT_MIN:
            self._cancelled = 0
            for queue in (self.prefill, self.late, self.decode, self.link):
                queue.sweep()

    def drain(self) -> list[QueuedSearch]:
        """Remove all waiting searches and return them."""
        queues = (self.prefill, self.late, self.decode, self.link)
        waiting = [item for queue in queues for item in queue if item.waits]
        for item in waiting:
            self.mark_left(item)
        return waiting
