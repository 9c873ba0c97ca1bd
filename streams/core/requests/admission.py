"""Admission: chooses which waiting request is next, and which to shed when the queue is full.

Theory of operation. The next request belongs to the best class with waiting requests, in it to the
tenant with the least service, and has the least slack of that tenant's. Service is counted in
tokens; tokens of answers count twice (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024). A tenant that begins to wait gets at least the count of the tenant that was served last, so
that no tenant saves up service.

Slack is deadline minus now minus estimated work, so its order among waiting requests never changes:
`deadline_ms - work_ms` is a fixed key, and a tenant's requests of a class are a heap. Ageing moves
a request to the next better class once per `AGEING_MS`; another heap orders these times. A queue is
a pair of heaps: `front` to serve from, `back` to shed from. Shedding takes from the worst class, in
it from the tenant with the most tokens. Requests that leave are marked and skipped when they reach
the top; when marks far outnumber requests, all heaps are rebuilt. Every operation is amortised
O(log n), except shedding, which looks at each tenant of a class.

Knows nothing of workers, credits or records; the handlers and `streams/core/router.py` call it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from schemas.records import Priority

CLASSES = {Priority.INTERACTIVE: 0, Priority.STANDARD: 1, Priority.BATCH: 2}
AGEING_MS: Final = 5_000  # no class waits for ever, and an urgent one is seldom overtaken
ANSWER_WEIGHT = 2  # weight of an answer's token; a prompt's has 1
_MARKS_MIN = 64
_TENANTS_MAX = 10_000  # beyond one for each waiting request


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant, with its service in weighted tokens."""

    tenant: str
    served: int
    waiting: int = 0  # its requests in the queue


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One waiting request; `level` is its current class, 0 the best."""

    request_id: str
    owner: _Tenant
    level: int
    key_ms: int
    seq: int
    tokens: int
    deadline_ms: int
    rises_ms: int
    queue: "_Queue | None" = None  # where it waits; None after it left


_Heap = list[tuple[int, int, QueuedRequest]]


@dataclass(slots=True, eq=False)
class _Queue:
    """One tenant's requests of one class, in two heaps with opposite orders."""

    owner: _Tenant
    tokens: int = 0
    front: _Heap = field(default_factory=list)
    back: _Heap = field(default_factory=list)

    def push(self, item: QueuedRequest) -> None:
        item.queue = self
        self.tokens += item.tokens
        heappush(self.front, (item.key_ms, item.seq, item))
        heappush(self.back, (-item.key_ms, -item.seq, item))

    def first(self, heap: _Heap) -> QueuedRequest | None:
        """Return the first request of one of the heaps that still waits here, if any."""
        while heap and heap[0][2].queue is not self:
            heappop(heap)
        return heap[0][2] if heap else None

    def compact(self) -> None:
        """Rebuild both heaps without the entries of requests that left."""
        for heap in (self.front, self.back):
            heap[:] = [entry for entry in heap if entry[2].queue is self]
            heapify(heap)


class _Class:
    """One priority class: a queue per tenant, and the order of the tenants."""

    def __init__(self) -> None:
        self.queues: dict[str, _Queue] = {}
        # (service when pushed, seq, queue); the service is at most the tenant's current one.
        self._turns: list[tuple[int, int, _Queue]] = []

    def push(self, item: QueuedRequest) -> None:
        owner = item.owner
        queue = self.queues.get(owner.tenant)
        if queue is None:
            queue = self.queues[owner.tenant] = _Queue(owner)
            heappush(self._turns, (owner.served, item.seq, queue))
        queue.push(item)

    def next(self) -> QueuedRequest | None:
        """Return the next request of the tenant with the least service; on ties the older one."""
        turns = self._turns
        while turns:
            served, seq, queue = turns[0]
            item = queue.first(queue.front)
            if item is None:
                heappop(turns)
                del self.queues[queue.owner.tenant]
            elif served < queue.owner.served:
                heapreplace(turns, (queue.owner.served, seq, queue))
            else:
                return item
        return None

    def worst(self) -> QueuedRequest | None:
        """Return the worst request of the tenant with the most tokens; on ties the latest one's."""
        queues = [queue for queue in reversed(self.queues.values()) if queue.first(queue.back)]
        largest = max(queues, key=lambda queue: queue.tokens, default=None)
        return None if largest is None else largest.first(largest.back)

    def compact(self) -> None:
        """Rebuild the heaps without marks, and drop empty queues."""
        for queue in self.queues.values():
            queue.compact()
        self._turns = [turn for turn in self._turns if turn[2].front]
        heapify(self._turns)
        self.queues = {name: queue for name, queue in self.queues.items() if queue.front}


class Admission:
    """Bounded priority queues, ordered by class, fair between tenants, and then by slack."""

    def __init__(self, *, requests_max: int, tokens_max: int) -> None:
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self.tokens = 0
        self._items: dict[str, QueuedRequest] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._served = 0  # service of the tenant that was served last, before that
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
        tenant: str,
        level: int,
        tokens: int,
        work_ms: int,
        deadline_ms: int,
        since_ms: int,
        now_ms: int,
    ) -> list[str]:
        """Queue a request that has waited since `since_ms`; return the shed ids, worst first.

        The arriving request may be among them. The last request in the queue is never shed, so
        that no single request is too large for an empty queue.
        """
        assert request_id not in self._items
        self._seq += 1
        key_ms, rises_ms = deadline_ms - work_ms, since_ms + AGEING_MS
        owner = self._owner(tenant)
        item = QueuedRequest(
            request_id, owner, level, key_ms, self._seq, tokens, deadline_ms, rises_ms
        )
        self.tokens += tokens
        owner.waiting += 1
        self._items[request_id] = item
        self._age(now_ms)
        self._enter(item, now_ms)
        heappush(self._deadlines, (deadline_ms, self._seq, item))
        return self._shed()

    def head(self, now_ms: int) -> str | None:
        """Return the request to serve next, if any; it stays until `serve` or `remove`."""
        if not self._items:
            return None
        self._age(now_ms)
        for priority_class in self._classes:
            if (item := priority_class.next()) is not None:
                return item.request_id
        raise AssertionError("somebody waits, and is in no queue")

    def slack_ms(self, now_ms: int) -> int:
        """Return the least slack of all waiting requests, in ms; 0 if none waits or it is late."""
        keys_ms = (item.key_ms for item in self._items.values())
        return max(0, min(keys_ms, default=now_ms) - now_ms)

    def serve(self, request_id: str) -> None:
        """Remove a request that was placed, and count its prompt as its tenant's service."""
        item = self._items[request_id]
        self._served = max(self._served, item.owner.served)
        item.owner.served += item.tokens
        self.remove(request_id)

    def count_answer(self, tenant: str, tokens: int) -> None:
        """Count an answer's tokens as its tenant's service."""
        self._owner(tenant).served += ANSWER_WEIGHT * tokens

    def remove(self, request_id: str) -> bool:
        """Remove a request that was cancelled or has ended; return whether it was queued."""
        item = self._items.pop(request_id, None)
        if item is None or item.queue is None:
            return False
        self.tokens -= item.tokens
        item.owner.waiting -= 1
        item.queue.tokens -= item.tokens
        item.queue = None
        self._marks += 1
        if not self._items:
            self._clear()
        elif self._marks > _MARKS_MIN + 2 * len(self._items):
            self._compact()
        return True

    def expire(self, now_ms: int) -> list[str]:
        """Remove and return the ids whose deadlines have passed, earliest deadline first."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            item = heappop(self._deadlines)[2]
            if item.queue is not None:
                self.remove(item.request_id)
                expired.append(item.request_id)
        return expired

    def _owner(self, tenant: str) -> _Tenant:
        """Return a tenant; if it begins to wait, raise its service to the last served one's."""
        owner = self._tenants.get(tenant)
        if owner is None:
            if len(self._tenants) >= _TENANTS_MAX + len(self._items):
                self._tenants = {name: t for name, t in self._tenants.items() if t.waiting}
            owner = self._tenants[tenant] = _Tenant(tenant, self._served)
        elif not owner.waiting:
            owner.served = max(owner.served, self._served)
        return owner

    def _rise(self, item: QueuedRequest, now_ms: int) -> None:
        """Move to the class that the whole wait has earned, however late the call is."""
        while item.level and item.rises_ms <= now_ms:
            item.level -= 1
            item.rises_ms += AGEING_MS

    def _enter(self, item: QueuedRequest, now_ms: int) -> None:
        """Put a request into the queue of its current class."""
        if item.queue is not None:
            item.queue.tokens -= item.tokens
        self._rise(item, now_ms)
        self._classes[item.level].push(item)
        if item.level:
            heappush(self._rises, (item.rises_ms, item.seq, item))

    def _age(self, now_ms: int) -> None:
        while self._rises and self._rises[0][0] <= now_ms:
            item = heappop(self._rises)[2]
            if item.queue is not None:
                self._enter(item, now_ms)

    def _shed(self) -> list[str]:
        shed = []
        while len(self._items) > 1 and (
            len(self._items) > self.requests_max or self.tokens > self.tokens_max
        ):
            items = (priority_class.worst() for priority_class in reversed(self._classes))
            worst = next(item for item in items if item is not None)
            self.remove(worst.request_id)
            shed.append(worst.request_id)
        return shed

    def _clear(self) -> None:
        """Clear all heaps when no request waits, because they have only marks."""
        self._marks = 0
        self._deadlines.clear()
        self._rises.clear()
        self._classes = [_Class() for _ in CLASSES]

    def _compact(self) -> None:
        """Rebuild all heaps without marks, so that memory follows the queue's length."""
        self._marks = 0
        for heap in (self._deadlines, self._rises):
            heap[:] = [entry for entry in heap if entry[2].queue is not None]
            heapify(heap)
        for priority_class in self._classes:
            priority_class.compact()


class UnservedRequests:
    """The ids of a model's queued requests whose LoRA adapters no living worker can load.

    They wait beside the queue, so that they delay no request that can be placed. They have no order
    among them: back in the queue, each has the place that it would have had. `tokens` counts those
    of their prompts.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._requests: dict[str, tuple[str, int]] = {}  # adapter and tokens, by id
        self._ids: dict[str, dict[str, None]] = {}  # by adapter

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    @property
    def adapters(self) -> list[str]:
        """Return the adapters that these requests wait for."""
        return list(self._ids)

    def add(self, request_id: str, adapter: str, tokens: int) -> None:
        """Add a request that is not in the queue."""
        self._requests[request_id] = adapter, tokens
        self._ids.setdefault(adapter, {})[request_id] = None
        self.tokens += tokens

    def remove(self, request_id: str) -> None:
        """Remove a request, if it is here."""
        if request_id in self._requests:
            adapter, tokens = self._requests.pop(request_id)
            self.tokens -= tokens
            del self._ids[adapter][request_id]
            if not self._ids[adapter]:
                del self._ids[adapter]

    def take(self, adapter: str) -> list[str]:
        """Remove and return all requests of an adapter, in the order in which they came."""
        request_ids = list(self._ids.get(adapter, {}))
        for request_id in request_ids:
            self.remove(request_id)
        return request_ids

    def take_last(self) -> str:
        """Remove and return the request that came last."""
        request_id = next(reversed(self._requests))
        self.remove(request_id)
        return request_id
