"""Follows the topic `passages`: what the embedding pool made of documents that came as text.

Like `documents.py`, and after it: what is there at the start counts only for documents that live as
text. Passages that nobody can mean, or by another model than their collection's, go to the dead
letters of `passages`, once for a shard.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.records import DocumentPassages
from schemas.retrieval import shard_of
from schemas.rules.sizes import CHUNKS_MAX, check_size
from schemas.settings import LogSettings
from schemas.topics import check_record, document_key
from workers.search.service.collections import Collections
from workers.search.service.refusals import Refusals, is_first
from workers.search.service.settings import ShardPlace
from workers.search.words.changes import PassagesChange, names_of

log = logging.getLogger("trivium.retrieval")
_BATCH_MAX, _HISTORY_BATCH = 500, 1_000


class PassageFollower:
    """`start` once documents are read, `run` until cancelled."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        collections: Collections,
        place: ShardPlace,
        membership: Membership,
        read_to: Callable[[], Mapping[int, int]],
    ) -> None:
        """`read_to` tells up to where `documents` is read."""
        self._codec = codec
        self._collections = collections
        self._place = place
        self.membership = membership  # of the present life
        self._read_to = read_to
        partitions = range(settings.document_partitions)
        self._reader = AssignedReader(
            settings, "passages", partitions, client_id=f"{membership.member_id}-passages"
        )
        self.refusals = Refusals(
            settings,
            producer,
            is_first=self._is_first,
            client_id=membership.member_id,
            topic="passages",
        )
        self._applying: asyncio.Future[Any] | None = None
        self.offsets: dict[int, int] = dict.fromkeys(partitions, 0)  # after the last one applied

    async def start(self, offsets: dict[int, int] | None = None) -> int:
        """Everything up to the end as of now, from `offsets` on; returns the number of records."""
        started_ms, count = wall_ms(), 0
        batch: list[ConsumerRecord] = []
        await self._reader.start(offsets or "earliest")
        self.offsets = dict.fromkeys(self.offsets, 0) | (offsets or {})
        async for record in self._reader.by_time(await self._reader.end_offsets()):
            batch.append(record)
            count += 1
            if len(batch) == _HISTORY_BATCH:
                await self._apply(batch)
                batch = []
        await self._apply(batch)
        log.info("took passages of %d documents in %d ms", count, wall_ms() - started_ms)
        return count

    async def fits(self, offsets: dict[int, int]) -> bool:
        """Whether the topic still holds everything from these offsets on."""
        return await self._reader.reaches(offsets)

    async def run(self) -> None:
        """Apply what comes."""
        while True:
            if batch := await self._reader.batch(max_records=_BATCH_MAX):
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

    async def _apply(self, batch: Sequence[ConsumerRecord]) -> None:
        changes: dict[tuple[str, str], tuple[PassagesChange, ConsumerRecord]] = {}
        for record in batch:
            try:
                change = self._change(record)
            except RecordError as error:
                if self._place.shard == 0:
                    await self.refusals.add(record, error)
                continue
            place = (record.partition, record.offset)
            if shard_of(change.document_id, self._place.shards) == self._place.shard and (
                not self._collections.has("passages", change.collection, *place)
            ):
                key = (change.collection, change.document_id)
                changes.pop(key, None)
                changes[key] = (change, record)
        async with self._collections.turn:
            work = asyncio.to_thread(
                self._collections.apply_passages, [change for change, _ in changes.values()]
            )
            self._applying = asyncio.ensure_future(work)
            failed = await asyncio.shield(self._applying)
        for record in batch:
            self.offsets[record.partition] = record.offset + 1
        for change, wrong in failed:
            await self.refusals.add(changes[change.collection, change.document_id][1], wrong)

    def _change(self, record: ConsumerRecord) -> PassagesChange:
        read_to = self._read_to().get(record.partition, 0)
        if not record.value:
            return PassagesChange(*names_of("passages", record.key), None, read_to)
        found = self._codec.decode(record.value)
        check_record("passages", found)
        assert isinstance(found, DocumentPassages)
        check_size(found, len(record.value))
        if record.key != (key := document_key(found.collection, found.document_id).encode()):
            raise RecordError(f"passages: expected the key {key!r:.200}, found {record.key!r:.200}")
        if len(found.chunks) > CHUNKS_MAX:
            raise RecordError(
                f"passages: expected at most {CHUNKS_MAX} of a document, found {len(found.chunks)}"
            )
        for chunk in found.chunks:
            if len(chunk.vector) % 4 or not chunk.vector or len(chunk.tokens) % 4:
                raise RecordError(
                    "passages: expected vectors of float32 and tokens of int32, found "
                    f"{len(chunk.vector)} and {len(chunk.tokens)} bytes"
                )
        return PassagesChange(found.collection, found.document_id, found, read_to)
