"""Follows a topic that every replica of a shard reads whole: first its history, then new records.

All partitions are read without a consumer group; documents of other shards are skipped by their id.
The history is read in the order of timestamps, from the beginning or from a snapshot's offsets.
Unusable records go to the dead-letter topic, once per shard.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import InvalidRequest, RecordError, TriviumError
from schemas.retrieval import shard_of
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.slices import in_slices
from workers.retrieval.collections import Collections
from workers.retrieval.feed.refusals import Refusals, is_first
from workers.retrieval.passages.changes import AnyChange, Failures
from workers.retrieval.settings import ShardPlace

log = logging.getLogger("trivium.retrieval")
# Unexpected errors that one record can cause; others are of memory, disks and devices.
BUGS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


class FeedFollower(ABC, Generic[AnyChange]):
    """The follower of one topic: `start` reads its history, then `run` until cancelled."""

    topic: str
    history_batch: int  # records that are applied together at the start
    batch_max: int  # records that are applied together later

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        collections: Collections,
        place: ShardPlace,
        membership: Membership,
    ) -> None:
        self._settings = settings
        self._codec, self._producer = codec, producer
        self._collections = collections
        self._place = place
        self.membership = membership  # of the present session
        name, partitions = membership.member_id, range(settings.document_partitions)
        self._reader = AssignedReader(
            settings, self.topic, partitions, client_id=f"{name}-{self.topic}"
        )
        self.refusals = Refusals(
            settings, producer, is_first=self._is_first, client_id=name, topic=self.topic
        )
        self._applying: asyncio.Future[Any] | None = None
        self.offsets: dict[int, int] = dict.fromkeys(partitions, 0)  # after the last one applied

    @abstractmethod
    async def _change(self, record: ConsumerRecord) -> AnyChange | None:
        """Return a record's change of a document; None if it is no document, and is applied here.

        Raises RecordError or InvalidRequest for an unusable record.
        """

    @abstractmethod
    def _apply_changes(self, changes: Sequence[AnyChange]) -> Failures[AnyChange]:
        """Apply changes to the collections, and return those that failed. Blocks."""

    def _after(self, before: AnyChange | None, change: AnyChange) -> AnyChange:
        """Return a change in the light of the document's change before it in the same batch."""
        return change

    async def start(self, offsets: dict[int, int] | None = None) -> int:
        """Apply all existing records from `offsets` on; return their number."""
        started_ms, count = wall_ms(), 0
        batch: list[ConsumerRecord] = []
        await self._reader.start(offsets or "earliest")
        self.offsets = dict.fromkeys(self.offsets, 0) | (offsets or {})
        async for record in self._reader.by_time(await self._reader.end_offsets()):
            batch.append(record)
            count += 1
            if len(batch) == self.history_batch:
                await self._apply(batch)
                batch = []
        await self._apply(batch)
        log.info("read %d records of %s in %d ms", count, self.topic, wall_ms() - started_ms)
        return count

    async def fits(self, offsets: dict[int, int]) -> bool:
        """Return whether the topic still has all records from these offsets on."""
        return await self._reader.reaches(offsets)

    async def run(self) -> None:
        """Apply records as they arrive, until cancelled."""
        while True:
            if batch := await self._reader.batch(max_records=self.batch_max):
                await self._apply(batch)

    async def stop(self) -> None:
        """Close the reader; waits for a batch that a thread is applying."""
        if self._applying is not None:
            await asyncio.wait([self._applying])
        await self.refusals.look()
        await self._reader.stop()

    @property
    def behind(self) -> int:
        """Return the number of records that are not applied yet."""
        return self._reader.lag(self.offsets)

    @property
    def applied_offsets(self) -> tuple[int, ...]:
        """Return, by partition, the offset below which records are applied or dead-lettered."""
        waiting = self.refusals.first_waiting()
        return tuple(
            min(offset, waiting.get(partition, offset))
            for partition, offset in sorted(self.offsets.items())
        )

    def _is_first(self) -> bool:
        member = self.membership
        return is_first(member.view, self._place, member.member_id, wall_ms())

    async def _apply(self, batch: Sequence[ConsumerRecord]) -> None:
        """Apply a batch. Shard 0 refuses unreadable records; a document's shard refuses others."""
        changes: dict[tuple[str, str], tuple[AnyChange, ConsumerRecord]] = {}
        async for record in in_slices(batch):
            try:
                change = await self._change(record)
            except (RecordError, InvalidRequest, *BUGS) as error:
                if self._place.shard == 0:
                    self.refusals.add(record, _as_trivium_error(error))
                continue
            if change is not None and self._is_wanted(change, record):
                key = (change.collection, change.document_id)
                before = changes.pop(key, None)  # keep the order of the last changes
                changes[key] = (self._after(before and before[0], change), record)
        await self._collections.wait_for_room()
        async with self._collections.change_lock:
            work = asyncio.to_thread(self._tried, [change for change, _ in changes.values()])
            self._applying = asyncio.ensure_future(work)
            failed = await asyncio.shield(self._applying)
            for change, wrong in failed:
                self.refusals.add(changes[change.collection, change.document_id][1], wrong)
            for record in batch:
                self.offsets[record.partition] = record.offset + 1
        await self.refusals.keep_bound()

    def _tried(self, changes: Sequence[AnyChange]) -> Failures[AnyChange]:
        """Apply changes and return those that failed; after an unexpected error, in halves.

        Otherwise one record would end the worker, and again at every start. Blocks.
        """
        try:
            return self._apply_changes(changes)
        except BUGS as error:
            if len(changes) == 1:
                return [(changes[0], _as_trivium_error(error))]
            middle = len(changes) // 2
            failed = self._tried(changes[:middle])
            return failed + self._tried(changes[middle:])

    def _is_wanted(self, change: AnyChange, record: ConsumerRecord) -> bool:
        """Return whether a change is of this shard and not in the snapshot."""
        is_mine = shard_of(change.document_id, self._place.shards) == self._place.shard
        return is_mine and not self._collections.has(
            self.topic, change.collection, record.partition, record.offset
        )

    def _check_key(self, record: ConsumerRecord, expected: str) -> None:
        if record.key != (key := expected.encode()):
            raise RecordError(
                f"{self.topic}: expected the key {key!r:.200}, found {record.key!r:.200}"
            )


def _as_trivium_error(error: Exception) -> TriviumError:
    """Return an error for the dead-letter topic; an unexpected one is logged with its traceback."""
    if isinstance(error, TriviumError):
        return error
    log.error("a record cannot be applied: a fault of ours, please report it", exc_info=error)
    return RecordError(f"cannot be applied, by a fault of ours: {error!r:.200}")
