"""Follows the topic `documents`, and the collections' dimensions and declarations on it.

The oldest document of a collection fixes its dimension, for every replica and at every start. When
that document is replaced, a wrong one may become the oldest. So a shard's first replica writes the
dimension to partition 0, and every start reads it before the documents. Operators' declarations of
collections are in the same partition. `follower.py` has the common part.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from schemas.errors import RecordError, TriviumError
from schemas.records import CollectionDeclared, CollectionMade, Document
from schemas.rules.sizes import DIM_MAX, REST_BYTES_MAX
from schemas.topics import check_record, collection_key, declaration_key, document_key
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from workers.retrieval.feed.follower import BUGS, FeedFollower
from workers.retrieval.passages.changes import DocumentChange, Failures, names_of

log = logging.getLogger("trivium.retrieval")


class DocumentFollower(FeedFollower[DocumentChange]):
    """The follower of `documents`: `start` reads its history, then `run` until cancelled."""

    topic = "documents"
    history_batch, batch_max = 5_000, 256
    _is_live = False  # the start applies declarations before it reads the documents

    async def start(self, offsets: dict[int, int] | None = None) -> int:
        """Apply all existing records from `offsets` on; return their number."""
        self._is_live = False
        await self._learn_dimensions(offsets or {})
        count = await super().start(offsets)
        self._is_live = True
        return count

    async def run(self) -> None:
        """Apply records and publish dimensions of new collections, until cancelled."""
        while True:
            await self._tell_dimensions()
            if batch := await self._reader.batch(max_records=self.batch_max):
                await self._apply(batch)

    async def _learn_dimensions(self, offsets: dict[int, int]) -> None:
        """Learn the dimensions and declarations of collections before documents are applied."""
        reader = AssignedReader(
            self._settings, "documents", [0], client_id=f"{self.membership.member_id}-made"
        )
        async with reader.reading({0: offsets[0]} if offsets else "earliest"):
            stream = reader.by_time(await reader.end_offsets())
            records = [record async for record in stream if (record.key or b"").startswith(b"/")]
        for record in reversed(records):  # the oldest of several counts: `run` applies later ones
            with suppress(RecordError, *BUGS):  # refused when it is read again with the documents
                if not _is_declaration(record):
                    self._learn_dimension(record)
        for record in filter(_is_declaration, records):  # the last of several counts
            with suppress(TriviumError, *BUGS):
                await self._declare(record)

    def _learn_dimension(self, record: ConsumerRecord) -> bool:
        """Learn a collection's dimension; return False for a document. Raises RecordError."""
        if not (record.key or b"").startswith(b"/"):
            return False
        if record.value:
            notice, place = self._codec.decode(record.value), self._place
            if not isinstance(notice, CollectionMade) or not 0 < notice.dim <= DIM_MAX:
                raise RecordError(
                    f"documents: expected a collection's dimension, found {notice!r:.200}"
                )
            self._check_key(record, collection_key(notice.collection, notice.shard, notice.shards))
            here = (notice.shard, notice.shards) == (place.shard, place.shards)
            self._collections.learn(notice, here=here)
        return True

    async def _declare(self, record: ConsumerRecord) -> None:
        """Apply an operator's declaration; raises RecordError or InvalidRequest."""
        try:
            name, declaration = (record.key or b"").decode().removeprefix(declaration_key("")), None
        except UnicodeDecodeError as error:
            raise RecordError(f"documents: expected a key in UTF-8: {error}") from error
        if record.value:
            declaration = self._codec.decode(record.value)
            if not isinstance(declaration, CollectionDeclared):
                raise RecordError(f"documents: expected a declaration, found {declaration!r:.200}")
            self._check_key(record, declaration_key(declaration.collection))
            if len(record.value) > REST_BYTES_MAX:
                raise RecordError(
                    f"documents: expected a declaration of at most {REST_BYTES_MAX} bytes, found "
                    f"{len(record.value)}"
                )
        async with self._collections.change_lock:
            await asyncio.to_thread(self._collections.declare, name, declaration)

    async def _tell_dimensions(self) -> None:
        """Write the dimensions of new collections; on a failure, retry after the next batch."""
        if not (untold := self._collections.unpublished_dims()) or not self._is_first():
            return
        place = self._place
        for name, dim in untold.items():
            notice = CollectionMade(
                collection=name, dim=dim, shard=place.shard, shards=place.shards, at_ms=wall_ms()
            )
            key = collection_key(name, place.shard, place.shards)
            try:
                await (await self._producer.send("documents", notice, key=key, partition=0))
            except (TriviumError, KafkaError) as error:
                log.warning("%s: its dimension is written later: %s", name, error)
                return
            self._collections.learn(notice, here=True)

    async def _change(self, record: ConsumerRecord) -> DocumentChange | None:
        if _is_declaration(record):
            if self._is_live:
                await self._declare(record)
            return None
        if self._learn_dimension(record):
            return None
        if record.value:
            document = self._codec.decode(record.value)
            check_record("documents", document)
            if not isinstance(document, Document):
                raise RecordError(
                    f"documents: expected a document under the key {record.key!r:.200}, found "
                    f"{document!r:.200}"
                )
            self._check_key(record, document_key(document.collection, document.document_id))
            content = None if document.deleted else document
            return DocumentChange(document.collection, document.document_id, content, record.offset)
        return DocumentChange(*names_of("documents", record.key), None, record.offset)

    def _apply_changes(self, changes: Sequence[DocumentChange]) -> Failures[DocumentChange]:
        return self._collections.apply(changes)

    def _after(self, before: DocumentChange | None, change: DocumentChange) -> DocumentChange:
        return change.after(before)


def _is_declaration(record: ConsumerRecord) -> bool:
    return bool((record.key or b"").startswith(declaration_key("").encode()))
