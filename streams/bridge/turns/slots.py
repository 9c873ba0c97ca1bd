"""Limits the requests in flight, and decides which owner is next.

All bridges together use a share of the credits that workers grant, so that other callers find free
ones. The owner with the fewest slots of a bridge gets the next one. An owner is a tenant or a topic
pair, so no owner waits for all earlier prompts of another. Each model has slots of its own, so that
prompts for a model without workers wait for none of another's.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from schemas.fleet import Member
from schemas.records import Role

_ANSWERING = (Role.DECODE, Role.REPLICA)


def limit(workers: Iterable[Member], bridges: int, *, share: float, in_flight_max: int) -> int:
    """Return how many requests one bridge may have in flight; 0 while no worker serves."""
    slots = sum(
        count
        for worker in workers
        for (_, role), count in worker.credits.items()
        if role in _ANSWERING
    )
    return min(in_flight_max, max(min(1, slots), int(slots * share / max(1, bridges))))


class Slots:
    """Slots of one model of a bridge; one owner's waiters get them in the order of `acquire`."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """Create one; the value of `limit` may change, and `hand_out` reads it each time."""
        self._limit = limit
        self._in_use: Counter[str] = Counter()  # by owner
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # waiters by owner

    @property
    def in_use(self) -> int:
        """Return the number of slots in use."""
        return self._in_use.total()

    @property
    def waiting(self) -> int:
        """Return the number of prompts that wait for a slot."""
        return sum(not waiter.cancelled() for line in self._lines.values() for waiter in line)

    async def acquire(self, owner: str = "") -> None:
        """Wait for a free slot and take it."""
        waiter = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(waiter)
        self.hand_out()
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release(owner)
            raise

    def release(self, owner: str = "") -> None:
        """Return a slot, and hand it to the next waiter."""
        self._in_use[owner] -= 1
        if not self._in_use[owner]:
            del self._in_use[owner]
        self.hand_out()

    def hand_out(self) -> None:
        """Hand free slots to waiters."""
        while self._lines and self.in_use < self._limit():
            owner = min(self._lines, key=lambda name: self._in_use[name])
            line = self._lines.pop(owner)
            waiter = line.popleft()
            if line:  # goes behind owners with as many slots
                self._lines[owner] = line
            if not waiter.cancelled():
                self._in_use[owner] += 1
                waiter.set_result(None)


class ModelSlots:
    """The slots of a bridge by model."""

    def __init__(self, models: Iterable[str], limit: Callable[[str, int], int]) -> None:
        """Create one; `limit` returns how many slots a model has while the other models together
        use so many. Its value may change."""
        self._slots = {model: Slots(partial(self._limit_of, model)) for model in models}
        self._limit = limit

    def _limit_of(self, model: str) -> int:
        used_by_others = sum(slots.in_use for name, slots in self._slots.items() if name != model)
        return self._limit(model, used_by_others)

    def of(self, model: str) -> Slots:
        """Return the slots of a model."""
        return self._slots[model]

    def hand_out(self) -> None:
        """Hand free slots to waiters of all models."""
        for slots in self._slots.values():
            slots.hand_out()
