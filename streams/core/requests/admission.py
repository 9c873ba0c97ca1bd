"""Admission: which waiting request is next, and which is shed when the queue is full.

Theory of operation. Slack is deadline minus now minus estimated work, so among waiting requests its
order never changes: `deadline_ms - work_ms` is a fixed key, and each class is a heap. Ageing moves
a request to the heap of the next better class once per `ageing_ms`; a third heap holds when. A
class is a pair of heaps, one to serve from its front and one to shed from its back. Requests that
leave are marked and skipped when they surface; when there are more marks than requests, all heaps
are rebuilt. Every operation is O(log n), amortised.

Knows nothing of workers, credits or records; `streams/core/router.py` calls it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from schemas.records import Priority

CLASSES = {Priority.INTERACTIVE: 0, Priority.STANDARD: 1, Priority.BATCH: 2}
_MARKS_MIN = 64


@dataclass(slots=True, eq=False)
class Waiting:
    """One waiting request; `level` is its class by now, 0 the best."""

    request_id: str
    level: int
    key_ms: int
    seq: int
    tokens: int
    deadline_ms: int
    rises_ms: int
    gone: bool = False


_Heap = list[tuple[int, int, Waiting]]


class _Class:
    """One priority class: the same requests in two heaps."""

    def __init__(self) -> None:
        self.front: _Heap = []
        self.back: _Heap = []

    def push(self, item: Waiting) -> None:
        heappush(self.front, (item.key_ms, item.seq, item))
        heappush(self.back, (-item.key_ms, -item.seq, item))


class Admission:
    """Bounded priority queues, ordered by class and then by slack."""

    def __init__(self, *, requests_max: int, tokens_max: int, ageing_ms: int) -> None:
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self.ageing_ms = ageing_ms
        self.tokens = 0
        self._items: dict[str, Waiting] = {}
        self._classes = [_Class() for _ in CLASSES]
        self._deadlines: _Heap = []
        self._rises: _Heap = []
        self._marks = 0
        self._seq = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._items

    def arrive(
        self,
        request_id: str,
        *,
        level: int,
        tokens: int,
        work_ms: int,
        deadline_ms: int,
        since_ms: int,
        now_ms: int,
    ) -> list[str]:
        """Take a request that has waited since `since_ms`; returns who is shed for it, worst first.

        The arriving request is among them when it is the worst. The last one is never shed, so
        that no single request is too large for an empty queue.
        """
        assert request_id not in self._items
        self._seq += 1
        key_ms, rises_ms = deadline_ms - work_ms, since_ms + self.ageing_ms
        item = Waiting(request_id, level, key_ms, self._seq, tokens, deadline_ms, rises_ms)
        self.tokens += tokens
        self._items[request_id] = item
        self._age(now_ms)
        self._enter(item, now_ms)
        heappush(self._deadlines, (deadline_ms, self._seq, item))
        return self._shed()

    def head(self, now_ms: int) -> str | None:
        """The request to serve next; it stays until `remove`."""
        if not self._items:
            return None
        self._age(now_ms)
        return self._first((queue, queue.front) for queue in self._classes)

    def slack_ms(self, now_ms: int) -> int:
        """The least time that is left beyond the work; 0 where nobody waits, or it is too late."""
        keys_ms = (item.key_ms for item in self._items.values())
        return max(0, min(keys_ms, default=now_ms) - now_ms)

    def remove(self, request_id: str) -> bool:
        """Take a request out, whether served, cancelled or ended; whether it was there."""
        item = self._items.pop(request_id, None)
        if item is None:
            return False
        self.tokens -= item.tokens
        item.gone = True
        self._marks += 1
        if not self._items:
            self._clear()
        elif self._marks > _MARKS_MIN + 2 * len(self._items):
            self._compact()
        return True

    def expire(self, now_ms: int) -> list[str]:
        """Take out and return those whose deadline has passed, earliest deadline first."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            item = heappop(self._deadlines)[2]
            if not item.gone:
                self.remove(item.request_id)
                expired.append(item.request_id)
        return expired

    def _rise(self, item: Waiting, now_ms: int) -> None:
        """To the class that the whole wait has earned, however late the call comes."""
        while item.level and item.rises_ms <= now_ms:
            item.level -= 1
            item.rises_ms += self.ageing_ms

    def _enter(self, item: Waiting, now_ms: int) -> None:
        """File under the class that is due."""
        self._rise(item, now_ms)
        self._classes[item.level].push(item)
        if item.level:
            heappush(self._rises, (item.rises_ms, item.seq, item))

    def _age(self, now_ms: int) -> None:
        while self._rises and self._rises[0][0] <= now_ms:
            item = heappop(self._rises)[2]
            if not item.gone:
                self._enter(item, now_ms)

    def _shed(self) -> list[str]:
        shed = []
        while len(self._items) > 1 and (
            len(self._items) > self.requests_max or self.tokens > self.tokens_max
        ):
            worst = self._first((queue, queue.back) for queue in reversed(self._classes))
            self.remove(worst)
            shed.append(worst)
        return shed

    def _first(self, heaps: Iterable[tuple[_Class, _Heap]]) -> str:
        """Who is the first in the first heap with anybody in it; somebody waits."""
        for queue, heap in heaps:
            while heap and _left(heap[0][2], queue, self._classes):
                heappop(heap)
            if heap:
                return heap[0][2].request_id
        raise AssertionError("somebody waits, and is in no heap")

    def _clear(self) -> None:
        """Nobody waits, so that all heaps hold nothing but marks."""
        self._marks = 0
        self._deadlines.clear()
        self._rises.clear()
        for queue in self._classes:
            queue.front.clear()
            queue.back.clear()

    def _compact(self) -> None:
        """Rebuild all heaps without marks, so that memory follows the queue's length."""
        self._marks = 0
        self._deadlines = [entry for entry in self._deadlines if not entry[2].gone]
        self._rises = [entry for entry in self._rises if not entry[2].gone]
        heapify(self._deadlines)
        heapify(self._rises)
        for queue in self._classes:
            queue.front = [e for e in queue.front if not _left(e[2], queue, self._classes)]
            queue.back = [e for e in queue.back if not _left(e[2], queue, self._classes)]
            heapify(queue.front)
            heapify(queue.back)


def _left(item: Waiting, queue: _Class, classes: list[_Class]) -> bool:
    """Whether a heap's entry is a mark: the request is gone, or has risen to a better class."""
    return item.gone or classes[item.level] is not queue
