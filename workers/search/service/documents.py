"""Follows the topic `documents`: all that is there, or what came after a snapshot, then live.

The worker reads all partitions with no consumer group, since every replica of a shard needs every
document of it; documents of other shards are skipped by their id. What is there at the start is
read in the order of its timestamps: the oldest document of a collection fixes its dimension, for
every replica and at every start. That document may be replaced one day and a wrong one be the
oldest then, so a shard's first replica writes the dimension beside the documents, to partition 0;
at a start it is read from there before them.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import RecordError, TriviumError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import CollectionMade, Document
from schemas.retrieval import shard_of
from schemas.rules.sizes import DIM_MAX
from schemas.settings import LogSettings
from schemas.topics import check_record, collection_key, document_key
from workers.search.service.collections import Change, Collections
from workers.search.service.refusals import Refusals, is_first
from workers.search.service.settings import ShardPlace

log = logging.getLogger("trivium.retrieval")
_BATCH_MAX, _HISTORY_BATCH = 2_000, 5_000


class DocumentFollower:
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
        self._settings = settings
        self._codec, self._producer = codec, producer
        self._collections = collections
        self._place = place
        self.membership = membership  # of the present life
        partitions = range(settings.document_partitions)
        self._reader = AssignedReader(
            settings, "documents", partitions, client_id=f"{membership.member_id}-documents"
        )
        self.refusals = Refusals(
            settings,
            producer,
            is_first=self._is_first,
            client_id=membership.member_id,
        )
        self._applying: asyncio.Future[Any] | None = None
        self.offsets: dict[int, int] = dict.fromkeys(partitions, 0)  # after the last one applied

    async def start(self, offsets: dict[int, int] | None = None) -> int:
        """Everything up to the end as of now, from `offsets` on; returns the number of records."""
        started_ms, count = wall_ms(), 0
        await self._learn_dimensions(offsets or {})
        batch: list[ConsumerRecord] = []
        await self._reader.start(offsets or "earliest")
        self.offsets = dict.fromkeys(self.offsets, 0) | (offsets or {})
        ends = await self._reader.end_offsets()
        async for record in self._reader.by_time(ends):
            batch.append(record)
            if len(batch) == _HISTORY_BATCH:
                count += len(batch)
                await self._apply(batch)
                batch = []
        count += len(batch)
        await self._apply(batch)
        self._collections.settle()
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
            await self._tell_dimensions()
            batch = await self._reader.batch(max_records=_BATCH_MAX)
            if batch:
                await self._apply(batch)

    async def stop(self) -> None:
        """Close; a batch that is being applied is waited for, since a thread cannot be stopped."""
        if self._applying is not None:
            await asyncio.wait([self._applying])
        await self.refusals.look()
        await self._reader.stop()

    def _is_first(self) -> bool:
        member = self.membership
        return is_first(member.view, self._place, member.member_id, wall_ms())

    async def _learn_dimensions(self, offsets: dict[int, int]) -> None:
        """What collections are, before any document is looked at."""
        reader = AssignedReader(
            self._settings, "documents", [0], client_id=f"{self.membership.member_id}-made"
        )
        await reader.start({0: offsets[0]} if offsets else "earliest")
        try:
            every = reader.by_time(await reader.end_offsets())
            made = [record async for record in every if (record.key or b"").startswith(b"/")]
        finally:
            await reader.stop()
        for record in reversed(made):  # of several the oldest counts: later ones follow in time
            with suppress(RecordError):  # buried where it is read with all others
                self._learned(record)

    def _learned(self, record: ConsumerRecord) -> bool:
        """Whether a record is no document, but says what a collection is; raises RecordError."""
        if not (record.key or b"").startswith(b"/"):
            return False
        if record.value:
            made, place = self._codec.decode(record.value), self._place
            if not isinstance(made, CollectionMade) or not 0 < made.dim <= DIM_MAX:
                raise RecordError(
                    f"documents: expected a collection's dimension, found {made!r:.200}"
                )
            self._check_key(record, collection_key(made.collection, made.shard, made.shards))
            here = (made.shard, made.shards) == (place.shard, place.shards)
            self._collections.learn(made, here=here)
        return True

    async def _tell_dimensions(self) -> None:
        """Write down what new collections are; once more with the next documents if it fails."""
        if not (untold := self._collections.untold()) or not self._is_first():
            return
        place = self._place
        for name, dim in untold.items():
            made = CollectionMade(
                collection=name, dim=dim, shard=place.shard, shards=place.shards, at_ms=wall_ms()
            )
            key = collection_key(name, place.shard, place.shards)
            try:
                await (await self._producer.send("documents", made, key=key, partition=0))
            except (TriviumError, KafkaError) as error:
                log.warning("%s: its dimension is written later: %s", name, error)
                return
            self._collections.learn(made, here=True)

    async def _apply(self, batch: Sequence[ConsumerRecord]) -> None:
        """Records that cannot be used are their shard's to bury, or the first shard's."""
        changes: dict[tuple[str, str], tuple[Change, ConsumerRecord]] = {}
        for record in batch:
            try:
                if self._learned(record):
                    continue
                change = self._change(record)
            except RecordError as error:
                if self._place.shard == 0:
                    await self.refusals.add(record, error)
                continue
            if shard_of(change.document_id, self._place.shards) == self._place.shard:
                key = (change.collection, change.document_id)
                changes.pop(key, None)  # it stands where it was written last
                changes[key] = (change, record)
        work = asyncio.to_thread(
            self._collections.apply, [change for change, _ in changes.values()]
        )
        self._applying = asyncio.ensure_future(work)
        failed = await asyncio.shield(self._applying)
        for record in batch:
            self.offsets[record.partition] = record.offset + 1
        for change, wrong in failed:
            await self.refusals.add(changes[change.collection, change.document_id][1], wrong)

    @staticmethod
    def _check_key(record: ConsumerRecord, wanted: str) -> None:
        if record.key != (key := wanted.encode()):
            raise RecordError(
                f"documents: expected the key {key!r:.200}, found {record.key!r:.200}"
            )

    def _change(self, record: ConsumerRecord) -> Change:
        if record.value:
            document = self._codec.decode(record.value)
            check_record("documents", document)
            if not isinstance(document, Document):
                raise RecordError(
                    f"documents: expected a document under the key {record.key!r:.200}, found "
                    f"{document!r:.200}"
                )
            self._check_key(record, document_key(document.collection, document.document_id))
            embedded_elsewhere = document.text and not document.vector
            kept = None if document.deleted or embedded_elsewhere else document
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
