"""A process's part in a consumer group: what it owns and has read, what it owes, what ended it.

The rules that routers and retrieval workers share. A record is acknowledged after all earlier ones
of its partition (`receipts`). No exception leaves an agent, for Faust would acknowledge the record
and go on: the first one ends the process's life instead, and whoever is next reads the record again
(`guard`, `wait_for_failure`). And a consumer that has died quietly ends it too
(`schemas/log/faust/watchdog.py`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Mapping

from schemas.log.faust.receipts import Place, Receipts


class Group:
    """One life in a consumer group."""

    def __init__(self) -> None:
        self.owned: frozenset[Place] = frozenset()
        self.rebalances = 0
        self.next_offsets: dict[Place, int] = {}  # after the last record read
        self.records_read = 0  # ever, of whatever is owned
        self.receipts = Receipts()
        self._full = 0  # agents that wait for room
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_assigned(self, places: set[Place]) -> None:
        """These partitions, and no others, are this process's now."""
        self.owned = frozenset(places)
        self.rebalances += 1

    def on_revoked(self) -> None:
        """None is any more: what was read is not acknowledged, and others read on from where they
        find it."""
        self.owned = frozenset()
        self.rebalances += 1
        self.next_offsets.clear()
        self.receipts.drop()

    def unread_count(self, ends: Mapping[Place, int]) -> int:
        """Records up to these offsets that were not read; of a partition of which none was read
        since it was assigned nothing is known."""
        read = self.next_offsets
        return sum(max(0, end - read[place]) for place, end in ends.items() if place in read)

    @contextlib.contextmanager
    def while_full(self) -> Iterator[None]:
        """Nothing is read meanwhile, since what was read takes all room: no consumer is stuck."""
        self._full += 1
        try:
            yield
        finally:
            self._full -= 1

    @property
    def is_full(self) -> bool:
        return self._full > 0

    async def guard(self, taking: Awaitable[None]) -> None:
        """Wait until a record is taken; does not return where that fails, for the life is over."""
        try:
            await taking
        except Exception as error:
            self.fail(error)
            await asyncio.Event().wait()

    def fail(self, error: BaseException) -> None:
        """End this life with this error, unless another did."""
        if not self._failed.done():
            self._failed.set_exception(error)

    @property
    def has_failed(self) -> bool:
        return self._failed.done()

    async def wait_for_failure(self) -> None:
        """Wait for a failure, and raise it."""
        await asyncio.shield(self._failed)
