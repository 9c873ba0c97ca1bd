"""How many questions may be under way at once: what bridges leave in Kafka until there is room.

All bridges together fill a share of what the workers grant, so that others find slots free, and a
million prompts wait in the log and not in memory.
"""

import asyncio
from collections import deque
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
    """Handed out in the order in which they were asked for."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` may change at any time; `hand_out` looks at it again."""
        self._limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return sum(not each.cancelled() for each in self._waiting)

    async def acquire(self) -> None:
        """Wait for one."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self.hand_out()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give one back."""
        self.taken -= 1
        self.hand_out()

    def hand_out(self) -> None:
        """Let in whoever there is room for."""
        while self._waiting and self.taken < self._limit():
            if not (waiting := self._waiting.popleft()).cancelled():
                self.taken += 1
                waiting.set_result(None)
