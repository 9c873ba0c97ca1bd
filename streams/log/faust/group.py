"""A member's state in a consumer group: its partitions, offsets, open receipts and failure.

The rules that routers and retrieval workers share. A record is acknowledged after all earlier ones
of its partition (`receipts`). No exception leaves an agent, because Faust would acknowledge the
record and continue: the first one ends the process's incarnation instead, and the next owner reads
the record again (`guard`, `wait_for_failure`). A consumer that stops without an error ends it too
(`streams/log/faust/watchdog.py`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Mapping

from streams.log.faust.receipts import Place, Receipts


class Group:
    """One incarnation of a member of a consumer group."""

    def __init__(self) -> None:
        self.owned: frozenset[Place] = frozenset()
        self.rebalances = 0
        self.next_offsets: dict[Place, int] = {}  # after the last record read
        self.records_read = 0  # since the start, on all partitions
        self.receipts = Receipts()
        self._full = 0  # agents that wait for free capacity
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_assigned(self, places: set[Place]) -> None:
        """Take these partitions; the process has no others."""
        self.owned = frozenset(places)
        self.rebalances += 1

    def on_revoked(self) -> None:
        """Give up all partitions: acknowledge none of the open records, which the next owners read
        again."""
        self.owned = frozenset()
        self.rebalances += 1
        self.next_offsets.clear()
        self.receipts.drop()

    def unread_count(self, ends: Mapping[Place, int]) -> int:
        """Return the number of unread records up to these offsets; partitions without a record read
        since their assignment do not count."""
        read = self.next_offsets
        return sum(max(0, end - read[place]) for place, end in ends.items() if place in read)

    @contextlib.contextmanager
    def while_full(self) -> Iterator[None]:
        """Mark that reading pauses because the capacity is used up: the consumer is not stuck."""
        self._full += 1
        try:
            yield
        finally:
            self._full -= 1

    @property
    def is_full(self) -> bool:
        return self._full > 0

    async def guard(self, taking: Awaitable[None]) -> None:
        """Wait until a record is taken; on an error, fail the incarnation and never return."""
        try:
            await taking
        except Exception as error:
            self.fail(error)
            await asyncio.Event().wait()

    def fail(self, error: BaseException) -> None:
        """End this incarnation with this error, unless another one has ended it."""
        if not self._failed.done():
            self._failed.set_exception(error)

    @property
    def has_failed(self) -> bool:
        return self._failed.done()

    async def wait_for_failure(self) -> None:
        """Wait for a failure, and raise it."""
        await asyncio.shield(self._failed)
