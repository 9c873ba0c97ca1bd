"""A member's state in a consumer group: its partitions, offsets, open receipts and failure.

The rules that all members share. A record is acknowledged after all earlier ones
of its partition (`Receipts`): Faust commits past a record in flight when a later one is
acknowledged (its defect 606). No exception leaves an agent, because Faust would acknowledge the
record and continue: the first one ends the process's incarnation instead, and the next owner reads
the record again (`guard`, `wait_for_failure`). A consumer that stops without an error ends it too
(`streams/log/faust/watchdog.py`). A new group begins now, because nobody waits for older records
(`commit_start_offsets`).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError, UnknownMemberIdError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.log.clock import wall_ms
from streams.log.connecting import query_client

Place = tuple[str, int]  # topic, without prefix, and partition


@dataclass(slots=True, eq=False)
class Receipt:
    """One record that was taken; `pending` is the number of its effects that are not done."""

    line: "deque[Receipt]"
    acknowledge: Callable[[], object]
    pending: int

    def settle(self, count: int = 1) -> None:
        """Count `count` effects as done. The last one acknowledges the record and those behind it
        that waited for it."""
        self.pending -= count
        while self.line and not self.line[0].pending:
            self.line.popleft().acknowledge()


class Receipts:
    """Records taken and not yet acknowledged, by partition."""

    def __init__(self) -> None:
        self._lines: dict[Place, deque[Receipt]] = {}

    def open(self, place: Place, acknowledge: Callable[[], object], pending: int = 1) -> Receipt:
        """Add the next record of a partition; with 0 pending it waits only for earlier ones."""
        line = self._lines.setdefault(place, deque())
        receipt = Receipt(line, acknowledge, pending)
        line.append(receipt)
        receipt.settle(0)
        return receipt

    def drop(self) -> None:
        """Drop all open receipts without acknowledgement: the partitions were revoked."""
        for line in self._lines.values():
            line.clear()
        self._lines.clear()


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


_BACK_MS = 10_000  # so that requests just before the first worker's start still count


async def commit_start_offsets(settings: LogSettings, group_id: str, topics: Sequence[str]) -> None:
    """Commit a new group's first offsets; existing ones stay. Raise BrokerUnavailable."""
    partitions = [
        TopicPartition(settings.topic_prefix + topic, partition)
        for topic in topics
        for partition in range(settings.partitions(TOPICS[topic].group))
    ]
    try:
        async with query_client(settings, group_id) as consumer:
            consumer.assign(partitions)
            new = [
                partition for partition in partitions if await consumer.committed(partition) is None
            ]
            if new:
                recent = await consumer.offsets_for_times(dict.fromkeys(new, wall_ms() - _BACK_MS))
                ends = await consumer.end_offsets(new)
                await consumer.commit(
                    {
                        partition: start.offset if (start := recent[partition]) else ends[partition]
                        for partition in new
                    }
                )
    except (CommitFailedError, UnknownMemberIdError):
        return  # another member was faster, and reads already
    except KafkaError as error:
        raise BrokerUnavailable(f"{group_id}: no offsets: {error}") from error
