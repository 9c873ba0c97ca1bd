"""How many questions may be under way at once, and whose is next.

All bridges together fill a share of what the workers grant, so that others find slots free. Who has
the fewest of a bridge's slots gets the next one, whether that is a tenant or a pair of topics: so
nobody waits for all that somebody else has brought before.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable

from schemas.fleet import Member
from schemas.records import Role

_ANSWERING = (Role.DECODE, Role.REPLICA)


def limit(workers: Iterable[Member], bridges: int, *, share: float, in_flight_max: int) -> int:
    """How many questions one of these bridges may have under way; none while no worker serves."""
    slots = sum(
        count
        for worker in workers
        for (_, role), count in worker.credits.items()
        if role in _ANSWERING
    )
    return min(in_flight_max, max(min(1, slots), int(slots * share / max(1, bridges))))


class Slots:
    """Of one owner's they are handed out in the order in which they were asked for."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` may change at any time; `hand_out` looks at it again."""
        self._limit = limit
        self._in_use: Counter[str] = Counter()  # by owner
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # likewise: who waits

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
            if line:  # behind others that have as many
                self._lines[owner] = line
            if not waiter.cancelled():
                self._in_use[owner] += 1
                waiter.set_result(None)
