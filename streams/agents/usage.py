"""Writes the usage of requests: one record each, numbered without gaps, by one writer at a time.

Theory of operation. Each owned partition has a transactional id. A router that takes a partition
starts its transactional id first, which fences the last owner, however long that one slept. Then
it reads what is committed: the last number, and, with the other records of a rebuild, which
requests have their record (`streams/agents/takeover.py`). A request counts as live for marks until
its record is committed (`Outbox.ending`), so the rebuild finds each request without one, and the
core writes its usage again. A record is committed after its request's outcome is in the log.

Usage is written from the first takeover on by a version that writes it. The offset of the first
outcome with usage is committed in a group of its own. If the log has dropped all records, numbers
continue at its first offset: each record took one offset, so no number is used twice.

A transaction costs the log about as much as a request: its partition is added, its end is written
twice, with a marker between. So one transaction has all requests that end on a partition in half a
second. A router that gives up partitions has pending records committed at once
(`UsageWriter.hurry`).
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from aiokafka import TopicPartition

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import Usage
from schemas.settings import LogSettings
from streams.core.effects import RecordUsage
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import Ack, AssignedReader, event_headers
from streams.log.connecting import query_client
from streams.log.faust.group import Place
from streams.log.transactions import (
    CommittedOffset,
    OutgoingRecord,
    Transactions,
    committed_offsets,
)

COMMIT_S = 0.5  # time for which records are gathered
_LOOK_BACK = 256  # offsets to search for the last record; 16 times as many at each further try


def usage_group(log: LogSettings) -> str:
    """Return the group whose offsets say from which outcome on usage is written; it has no
    members."""
    return f"{log.topic_prefix}router.usage"


@dataclass(frozen=True, slots=True)
class _PendingUsage:
    usage: Usage
    outcome: Ack | None  # to wait for
    ack: Ack


class _Account:
    """The writer of one partition's records, from the next number on."""

    def __init__(self, log: LogSettings, codec: Codec, router_id: str, partition: int) -> None:
        self.transactions = Transactions(log, f"usage-{partition}")
        self.next_number = 0
        self.since: int | None = None  # offset of the first outcome whose usage is written
        self._codec, self._router_id = codec, router_id
        self._topic, self._partition = f"{log.topic_prefix}usage", partition
        self._waiting: list[_PendingUsage] = []
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def start(self) -> None:
        """Fence the last owner; then all its transactions are decided and can be read."""
        await self.transactions.start([(self._topic, self._partition)])

    def add(self, entry: _PendingUsage) -> None:
        """Commit an entry soon, together with others."""
        if self._error is not None:
            entry.ack.set_exception(self._error)
            return
        self._waiting.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._commit_all())

    def hurry(self) -> None:
        """Stop gathering: commit waiting and later entries at once."""
        self._hurried.set()

    async def _commit_all(self) -> None:
        """Commit all waiting entries. A failure goes to their acks, where it ends the router."""
        while self._waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_S):
                    await self._hurried.wait()
            entries = self._waiting[:]
            try:
                await self._commit(entries)
            except Exception as error:
                self._error = error
                for entry in self._waiting:
                    entry.ack.set_exception(error)
                self._waiting.clear()
                return
            del self._waiting[: len(entries)]
            for entry in entries:
                entry.ack.set_result(None)

    async def _commit(self, entries: list[_PendingUsage]) -> None:
        outcomes = [entry.outcome for entry in entries if entry.outcome is not None]
        if outcomes:
            acks, _ = await asyncio.wait(outcomes)  # `wait` does not cancel them
            for outcome in acks:
                outcome.result()
        sends = [
            self._sending(replace(entry.usage, number=number))
            for number, entry in enumerate(entries, self.next_number)
        ]
        await self.transactions.commit(sends)
        self.next_number += len(sends)

    def _sending(self, usage: Usage) -> OutgoingRecord:
        event_id = f"{self._partition}-{usage.number}"
        return OutgoingRecord(
            topic=self._topic,
            partition=self._partition,
            key=usage.request_id.encode(),
            value=self._codec.encode(usage),
            headers=event_headers("Usage", self._router_id, event_id),
        )

    async def stop(self) -> None:
        """Commit nothing more, and close; the next owner writes what is still waiting."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        for entry in self._waiting:
            entry.ack.set_result(None)
        self._waiting.clear()
        await self.transactions.stop()


class UsageWriter:
    """Writes the usage of the partitions that a router owns."""

    def __init__(self, log: LogSettings, codec: Codec, router_id: str) -> None:
        self._log = log
        self._codec = codec
        self._router_id = router_id
        self._accounts: dict[int, _Account] = {}

    def write(self, use: RecordUsage, outcome: Ack | None) -> Ack:
        """Commit a record after the outcome is acknowledged; return a future of the commit."""
        ack: Ack = asyncio.get_running_loop().create_future()
        account = self._accounts.get(use.partition)
        if account is None:  # it was given up: its new owner writes the usage
            ack.set_result(None)
        else:
            account.add(_PendingUsage(use.usage, outcome, ack))
        return ack

    async def take(self, partitions: Collection[int]) -> None:
        """Fence the last writers of these partitions, and read where to continue. Raise
        BrokerUnavailable if the log cannot be reached."""
        accounts = {p: _Account(self._log, self._codec, self._router_id, p) for p in partitions}
        self._accounts |= accounts
        await asyncio.gather(*(account.start() for account in accounts.values()))
        places = {self._place(partition): partition for partition in partitions}
        positions = await committed_offsets(self._log, usage_group(self._log), list(places))
        numbers = await self._next_numbers(list(partitions))
        for place, partition in places.items():
            account, since = accounts[partition], positions.get(place)
            account.next_number = numbers[partition]
            account.since = since.offset if since else 0 if numbers[partition] else None

    def is_older(self, partition: int, offset: int) -> bool:
        """Return whether an outcome was written before usage was recorded."""
        since = self._accounts[partition].since
        return since is None or offset < since

    async def begin(self, partitions: Iterable[int], read_to: dict[Place, int]) -> None:
        """Begin to write the usage of all outcomes from now on. On a partition without any usage
        yet, commit the offset up to which outcomes were read, which excludes older outcomes."""
        for partition in partitions:
            account = self._accounts[partition]
            if account.since is None:
                account.since = read_to["outcomes", partition]
                position = {self._place(partition): CommittedOffset(account.since)}
                await account.transactions.commit([], position, usage_group(self._log))

    def hurry(self) -> None:
        """Commit at once from now on, until the partitions are given up."""
        for account in self._accounts.values():
            account.hurry()

    async def keep(self, partitions: Collection[int]) -> None:
        """Stop writing the usage of all other partitions."""
        accounts = [self._accounts.pop(p) for p in sorted(self._accounts.keys() - set(partitions))]
        await asyncio.gather(*(account.stop() for account in accounts))

    def _place(self, partition: int) -> Place:
        return f"{self._log.topic_prefix}outcomes", partition

    async def _next_numbers(self, partitions: list[int]) -> dict[int, int]:
        """Return each partition's next number: the last record's plus 1, or 0 without records.

        Ends of partitions include transactions whose commits are not visible yet.
        """
        topic = f"{self._log.topic_prefix}usage"
        places = [TopicPartition(topic, p) for p in partitions]
        async with query_client(self._log, topics=[topic]) as consumer:
            firsts = await consumer.beginning_offsets(places)
            ends = await consumer.end_offsets(places)
        numbers = [self._next_number(tp.partition, firsts[tp], ends[tp]) for tp in places]
        return dict(zip(partitions, await asyncio.gather(*numbers), strict=True))

    async def _next_number(self, partition: int, first: int, end: int) -> int:
        name = f"{self._router_id}-usage"
        reader = AssignedReader(
            self._log, "usage", [partition], client_id=name, committed_only=True
        )
        at, back = end, _LOOK_BACK
        async with reader.reading("nowhere"):
            while at > first:
                at, back = max(first, end - back), back * 16
                await reader.seek({partition: at})
                records = [
                    record async for batch in reader.until({partition: end}) for record in batch
                ]
                for record in reversed(records):
                    with contextlib.suppress(RecordError):  # not written by a router
                        if isinstance(last := self._codec.decode(record.value), Usage):
                            return last.number + 1
        return first
