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
from schemas.errors import InvalidRequest, RecordError, TriviumError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import CollectionDeclared, CollectionMade, Document
from schemas.retrieval import shard_of
from schemas.rules.sizes import DIM_MAX, REST_BYTES_MAX
from schemas.settings import LogSettings
from schemas.topics import check_record, collection_key, declaration_key, document_key
from workers.search.service.collections import Collections
from workers.search.service.refusals import Refusals, is_first
from workers.search.service.settings import ShardPlace
from workers.search.words.changes import Change, names_of

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
        self._is_live = False  # before, what was declared is learned ahead of the documents
        self.offsets: dict[int, int] = dict.fromkeys(partitions, 0)  # after the last one applied

    async def start(self, offsets: dict[int, int] | None = None) -> int:
        """Everything up to the end as of now, from `offsets` on; returns the number of records."""
        started_ms, count, self._is_live = wall_ms(), 0, False
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
        self._is_live = True
        log.info("read %d documents in %d ms", count, wall_ms() - started_ms)
        return count

    async def fits(self, offsets: dict[int, int]) -> bool:
        """Whether the topic still holds everything from these offsets on."""
        return await self._reader.reaches(offsets)

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

    @property
    def behind(self) -> int:
        """Records that are not applied yet."""
        return self._reader.behind(self.offsets)

    def _is_first(self) -> bool:
        member = self.membership
        return is_first(member.view, self._place, member.member_id, wall_ms())

    async def _learn_dimensions(self, offsets: dict[int, int]) -> None:
        """What collections are, before any document is looked at."""
        reader = AssignedReader(
            self._settings, "documents", [0], client_id=f"{self.membership.member_id}-made"
        )
        async with reader.reading({0: offsets[0]} if offsets else "earliest"):
            every = reader.by_time(await reader.end_offsets())
            made = [record async for record in every if (record.key or b"").startswith(b"/")]
        for record in reversed(made):  # of several the oldest counts: later ones follow in time
            with suppress(RecordError):  # buried where it is read with all others
                if not _is_declaration(record):
                    self._learned(record)
        for record in filter(_is_declaration, made):  # of several the last counts
            with suppress(TriviumError):
                await self._declare(record)

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

    async def _declare(self, record: ConsumerRecord) -> None:
        """What an operator says of a collection; raises RecordError or InvalidRequest."""
        try:
            name, said = (record.key or b"").decode().removeprefix(declaration_key("")), None
        except UnicodeDecodeError as error:
            raise RecordError(f"documents: expected a key in UTF-8: {error}") from error
        if record.value:
            said = self._codec.decode(record.value)
            if not isinstance(said, CollectionDeclared):
                raise RecordError(f"documents: expected a declaration, found {said!r:.200}")
            self._check_key(record, declaration_key(said.collection))
            if len(record.value) > REST_BYTES_MAX:
                raise RecordError(
                    f"documents: expected a declaration of at most {REST_BYTES_MAX} bytes, found "
                    f"{len(record.value)}"
                )
        async with self._collections.turn:
            await asyncio.to_thread(self._collections.declare, name, said)

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
                if _is_declaration(record):
                    if self._is_live:
                        await self._declare(record)
                    continue
                if self._learned(record):
                    continue
                change = self._change(record)
            except (RecordError, InvalidRequest) as error:
                if self._place.shard == 0:
                    await self.refusals.add(record, error)
                continue
            place = (record.partition, record.offset)
            if shard_of(change.document_id, self._place.shards) == self._place.shard and (
                not self._collections.has("documents", change.collection, *place)
            ):
                key = (change.collection, change.document_id)
                before = changes.pop(key, None)  # it stands where it was written last
                changes[key] = (change.after(before and before[0]), record)
        async with self._collections.turn:
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
            kept = None if document.deleted else document
            return Change(document.collection, document.document_id, kept, record.offset)
        return Change(*names_of("documents", record.key), None, record.offset)


def _is_declaration(record: ConsumerRecord) -> bool:
    return bool((record.key or b"").startswith(declaration_key("").encode()))
