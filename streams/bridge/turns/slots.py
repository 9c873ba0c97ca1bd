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
        self._taken: Counter[str] = Counter()  # by owner
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # likewise: who waits

    @property
    def taken(self) -> int:
        """How many are."""
        return self._taken.total()

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return sum(not each.cancelled() for line in self._lines.values() for each in line)

    async def acquire(self, owner: str = "") -> None:
        """Wait for one."""
        mine = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(mine)
        self.hand_out()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self.release(owner)
            raise

    def release(self, owner: str = "") -> None:
        """Give one back."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self.hand_out()

    def hand_out(self) -> None:
        """Let in whoever there is room for."""
        while self._lines and self.taken < self._limit():
            owner = min(self._lines, key=lambda each: self._taken[each])
            line = self._lines.pop(owner)
            waiting = line.popleft()
            if line:  # behind others that have as many
                self._lines[owner] = line
            if not waiting.cancelled():
                self._taken[owner] += 1
                waiting.set_result(None)
