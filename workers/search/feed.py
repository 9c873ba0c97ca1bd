"""Follows the topic `documents`: all that is there, or what came after a snapshot, then live.

The worker reads all partitions with no consumer group, since every replica of a shard needs every
document of it; documents of other shards are skipped by their id. What is there at the start is
read in the order of its timestamps: the oldest document of a collection fixes its dimension, for
every replica and at every start.
"""

import asyncio
import logging
from collections.abc import Sequence

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import Document
from schemas.retrieval import shard_of
from schemas.settings import LogSettings
from schemas.topics import check_record, document_key
from workers.search.collections import Change, Collections
from workers.search.refusals import Refusals, is_first
from workers.search.settings import ShardPlace

log = logging.getLogger("trivium.retrieval")
_BATCH_MAX, _HISTORY_BATCH = 2_000, 5_000


class DocumentFeed:
    """`start` rebuilds, `run` follows until cancelled."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        collections: Collections,
        place: ShardPlace,
        membership: Membership,
    ) -> None:
        self._codec = codec
        self._collections = collections
        self._place = place
        partitions = range(settings.document_partitions)
        self._reader = AssignedReader(
            settings, "documents", partitions, client_id=f"{membership.member_id}-documents"
        )
        self.refusals = Refusals(
            settings,
            producer,
            is_first=lambda: is_first(membership.view, place, membership.member_id, wall_ms()),
            client_id=membership.member_id,
        )
        self.offsets: dict[int, int] = dict.fromkeys(partitions, 0)  # after the last one applied

    async def start(self, offsets: dict[int, int] | None = None) -> int:
        """Everything up to the end as of now, from `offsets` on; returns the number of records."""
        started_ms, count = wall_ms(), 0
        batch: list[ConsumerRecord] = []
        await self._reader.start(offsets or "earliest")
        self.offsets.update(offsets or {})
        ends = await self._reader.end_offsets()
        async for record in self._reader.by_time(ends):
            batch.append(record)
            if len(batch) == _HISTORY_BATCH:
                count += len(batch)
                await self._apply(batch)
                batch = []
        count += len(batch)
        await self._apply(batch)
        log.info("read %d documents in %d ms", count, wall_ms() - started_ms)
        return count

    async def fits(self, offsets: dict[int, int]) -> bool:
        """Whether the topic still holds everything from these offsets on."""
        await self._reader.start("latest")
        try:
            ends = await self._reader.end_offsets()
        finally:
            await self._reader.stop()
        return offsets.keys() == ends.keys() and all(offsets[p] <= end for p, end in ends.items())

    async def run(self) -> None:
        """Apply what comes."""
        while True:
            batch = await self._reader.batch(max_records=_BATCH_MAX)
            if batch:
                await self._apply(batch)

    async def stop(self) -> None:
        """Close."""
        await self.refusals.look()
        await self._reader.stop()

    async def _apply(self, batch: Sequence[ConsumerRecord]) -> None:
        """Records that cannot be used are their shard's to bury, or the first shard's."""
        changes: dict[tuple[str, str], tuple[Change, ConsumerRecord]] = {}
        for record in batch:
            try:
                change = self._change(record)
            except RecordError as error:
                if self._place.shard == 0:
                    await self.refusals.add(record, error)
                continue
            if shard_of(change.document_id, self._place.shards) == self._place.shard:
                key = (change.collection, change.document_id)
                changes.pop(key, None)  # it stands where it was written last
                changes[key] = (change, record)
        failed = await asyncio.to_thread(
            self._collections.apply, [change for change, _ in changes.values()]
        )
        for record in batch:
            self.offsets[record.partition] = record.offset + 1
        for change, wrong in failed:
            await self.refusals.add(changes[change.collection, change.document_id][1], wrong)

    def _change(self, record: ConsumerRecord) -> Change:
        if record.value:
            document = self._codec.decode(record.value)
            check_record("documents", document)
            assert isinstance(document, Document)
            key = document_key(document.collection, document.document_id).encode()
            if record.key != key:
                raise RecordError(f"documents: expected the key {key!r:.200}, found {record.key!r}")
            kept = None if document.deleted else document
            return Change(document.collection, document.document_id, kept)
        try:
            collection, slash, document_id = (record.key or b"").decode().partition("/")
        except UnicodeDecodeError as error:
            raise RecordError(f"documents: expected a key in UTF-8: {error}") from error
        if not slash:
            raise RecordError(
                f"documents: expected the key collection/document_id, found {record.key!r:.200}"
            )
        return Change(collection, document_id, None)
