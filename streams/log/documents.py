"""Writes documents and collection records, and follows what becomes of documents.

Embedding workers write a document's passages, or a dead letter, or nothing if it has not changed,
and then acknowledge it. Retrieval workers index or dead-letter the passages, and report their
offsets. So a document is done when its group has read past it without passages, or when all workers
of its shard have indexed or dead-lettered its passages; a shard without workers is not waited for.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.fleet import FleetView
from schemas.records import CollectionDeclared, Document, DocumentPassages, MemberKind, MemberState
from schemas.retrieval import shard_of
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_SUFFIX, declaration_key, document_key, partition_of
from streams.log.clients import Ack, AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.connecting import query_client
from streams.log.retrieval.results import embedding_workers, layout_of
from streams.log.slices import in_slices

KEPT = ("x-vectors", b"kept")  # header of passages whose vectors have not changed


def embedding_group(log: LogSettings, pool: str = "") -> str:
    """Return the consumer group of an embedding pool; the first one's has no name."""
    return f"{log.topic_prefix}embedding{pool and '.'}{pool}"


def embedding_groups(log: LogSettings, view: FleetView, now_ms: int) -> list[str]:
    """Return the consumer groups of the first embedding pool, and of the others that have a ready
    worker: each of them reads all documents."""
    pools = {
        embedding.pool
        for member in embedding_workers(view, now_ms)
        if (embedding := member.registration.embedding) is not None
    }
    return [embedding_group(log, pool) for pool in sorted({"", *pools})]


async def declare(
    producer: LogProducer, log: LogSettings, collection: str, declaration: CollectionDeclared | None
) -> None:
    """Write a record about a collection, or its tombstone. Raise BrokerUnavailable."""
    key = declaration_key(collection)
    if declaration is not None:
        ack = await producer.send("documents", declaration, key=key, partition=0)
    else:
        topic = log.topic_prefix + "documents"
        ack = await producer.send_raw(topic, None, key=key.encode(), partition=0)
    await ack


async def send_document(producer: LogProducer, log: LogSettings, document: Document) -> Ack:
    """Send a document as `LogProducer.send` does. Raise RecordTooLarge, BrokerUnavailable."""
    key = document_key(document.collection, document.document_id)
    partition = partition_of(key, log.document_partitions)
    return await producer.send("documents", document, key=key, partition=partition)


_UNDER_WAY = 500  # most sends without acknowledgement
_LOOK_MS = 300
_LOOK_AT_LEAST_S = 2.0  # while other documents' passages keep coming
_TOPIC, _PASSAGES = "documents", "passages"
_ORIGIN = ("x-dlq-partition", "x-dlq-offset")
Place = tuple[int, int]  # partition and offset
OnDone = Callable[[str], None]


@dataclass(slots=True)
class IngestCounts:
    """Counts of one call's documents by their results."""

    written: int = 0
    deleted: int = 0
    embedded: int = 0
    passages: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)  # id and reason
    done_count: int = 0

    @property
    def unchanged(self) -> int:
        """Return the documents for which a worker had nothing to embed."""
        return self.done_count - self.embedded - len(self.refused)

    @property
    def waiting(self) -> int:
        return self.written - self.done_count


@dataclass(slots=True)
class _PendingDocument:
    """A document that is neither indexed nor refused yet."""

    document_id: str
    on_done: OnDone
    on_read: Callable[[], None]  # called when an embedding worker is done with it
    embedded: int = 0  # passages that were embedded now


class Ingester:
    """Ingests documents: `start`, then `put` and `delete`, then `follow` their results; `stop`."""

    def __init__(self, log: LogSettings, codec: Codec, view: Callable[[], FleetView]) -> None:
        """Create an ingester; `view` returns the current fleet."""
        self.counts = IngestCounts()
        self._log, self._codec, self._view = log, codec, view
        self._producer = LogProducer(log, codec, durable=True, client_id="trivium-ingest")
        partitions = range(log.document_partitions)
        self._passages = AssignedReader(log, _PASSAGES, partitions, client_id="trivium-ingest")
        self._letters = {
            topic: AssignedReader(
                log, topic + DEAD_LETTER_SUFFIX, [0], client_id=f"trivium-ingest-{topic}-letters"
            )
            for topic in (_TOPIC, _PASSAGES)
        }
        self._acks: list[Any] = []
        self._open: dict[Place, _PendingDocument] = {}  # documents without a result yet
        self._unindexed: dict[
            Place, _PendingDocument
        ] = {}  # by the place of their passages, which are not indexed yet

    async def start(self) -> None:
        """Connect; results from now on are not missed. Raise BrokerUnavailable."""
        await self._producer.start()
        await self._passages.start("latest")
        for letters in self._letters.values():
            await letters.start("latest")

    async def stop(self) -> None:
        """Close the producer and all readers."""
        await self._producer.stop()
        await self._passages.stop()
        for letters in self._letters.values():
            await letters.stop()

    async def put(
        self,
        document: Document,
        on_done: OnDone = lambda reason: None,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a document. `follow` calls `on_read` when an embedding worker is done with it, then
        `on_done` with the reason of a refusal, or an empty text.

        Raises RecordTooLarge, BrokerUnavailable.
        """
        ack = await send_document(self._producer, self._log, document)
        self.counts.written += 1
        await self._add(self._track(_PendingDocument(document.document_id, on_done, on_read), ack))

    async def delete(self, collection: str, document_id: str) -> None:
        """Delete a document: write a tombstone under its key."""
        key = document_key(collection, document_id)
        partition = partition_of(key, self._log.document_partitions)
        topic = self._log.topic_prefix + _TOPIC
        ack = await self._producer.send_raw(topic, None, key=key.encode(), partition=partition)
        self.counts.deleted += 1
        await self._add(_acknowledged(ack))

    async def _add(self, sending: Any) -> None:
        self._acks.append(asyncio.ensure_future(sending))
        if len(self._acks) >= _UNDER_WAY:
            await self.flush()

    async def flush(self) -> None:
        """Wait until the broker has acknowledged all writes."""
        acks, self._acks = self._acks, []
        await asyncio.gather(*acks)

    async def _track(self, waiting: _PendingDocument, ack: Any) -> None:
        place = await ack
        self._open[int(place.partition), int(place.offset)] = waiting

    async def follow(self, report: Callable[[IngestCounts], None]) -> None:
        """Wait until all written documents are done; `report` gets every change of the counts."""
        await self.flush()
        topic, count = self._log.topic_prefix + _TOPIC, self._log.document_partitions
        places = [TopicPartition(topic, partition) for partition in range(count)]
        async with AsyncExitStack() as closing:
            groups = []
            for group in embedding_groups(self._log, self._view(), wall_ms()):
                asking = await closing.enter_async_context(query_client(self._log, group))
                asking.assign(places)
                groups.append(asking)
            looked_s = float("-inf")
            while self._open or self._unindexed:
                records = await self._passages.batch(timeout_ms=_LOOK_MS)
                await self._take(records)
                if not records or time.monotonic() - looked_s > _LOOK_AT_LEAST_S:
                    looked_s = time.monotonic()
                    await self._check_group(
                        {
                            place.partition: min(
                                [await asking.committed(place) or 0 for asking in groups]
                            )
                            for place in places
                        }
                    )
                    await self._check_indexes()
                report(self.counts)

    async def _check_group(self, committed: dict[int, int]) -> None:
        """Close documents before the offsets that all groups have committed: workers write passages
        and dead letters before they commit."""
        for place, reason in await self._buried(_TOPIC):
            self._close(self._open, place, reason)
        await self._take(await self._passages.read_to_end())
        for partition, offset in list(self._open):
            if offset < committed.get(partition, 0):
                self._close(self._open, (partition, offset))

    async def _check_indexes(self) -> None:
        """Close documents that the indexes have passed: workers dead-letter the passages that they
        refuse before they report their offsets."""
        done_places = [
            place for place, doc in self._unindexed.items() if self._is_done(place, doc.document_id)
        ]
        if done_places:
            for place, reason in await self._buried(_PASSAGES):
                self._close(self._unindexed, place, reason)
            for place in done_places:
                self._close(self._unindexed, place)

    def _is_done(self, place: Place, document_id: str) -> bool:
        """Return whether all workers of the document's shard have read past these passages."""
        now_ms, view, (partition, offset) = wall_ms(), self._view(), place
        layout = layout_of(view, now_ms)
        shard = shard_of(document_id, layout.shards) if layout.shards else 0
        for member in view.living(MemberKind.WORKER, now_ms):
            search = member.registration.search
            if search is None or (search.shard, search.shards) != (shard, layout.shards):
                continue
            done_offsets = member.search.passages_done if member.search is not None else ()
            offsets = done_offsets[partition : partition + 1]  # older releases report none
            if member.state is MemberState.READY and offsets and offsets[0] <= offset:
                return False
        return True

    async def _buried(self, topic: str) -> list[tuple[Place, str]]:
        """Return the places of a topic's dead-lettered records, with reasons."""
        burials: list[tuple[Place, str]] = []
        for record in await self._letters[topic].read_to_end():
            headers = dict(record.headers)
            partition, offset = (_number(headers.get(name)) for name in _ORIGIN)
            reason = headers.get("x-dlq-error-message", b"").decode(errors="replace")
            burials.append(((partition, offset), reason or "it cannot be used"))
        return burials

    async def _take(self, records: list[ConsumerRecord]) -> None:
        """Match passages of the log to their documents."""
        async for record in in_slices(records):
            if not record.value:
                continue
            try:
                passages = self._codec.decode(record.value)
            except RecordError:  # retrieval workers dead-letter it
                continue
            if not isinstance(passages, DocumentPassages):
                continue
            waiting = self._open.pop((record.partition, passages.documents_offset), None)
            if waiting is not None:
                waiting.on_read()
                waiting.embedded = 0 if KEPT in record.headers else len(passages.chunks)
                self._unindexed[record.partition, record.offset] = waiting

    def _close(
        self, waiting: dict[Place, "_PendingDocument"], place: Place, refused: str = ""
    ) -> None:
        closed = waiting.pop(place, None)
        if closed is None:
            return
        if waiting is self._open:
            closed.on_read()
        self.counts.done_count += 1
        if refused:
            self.counts.refused.append((closed.document_id, refused))
        elif closed.embedded:
            self.counts.embedded += 1
            self.counts.passages += closed.embedded
        closed.on_done(refused)


def _number(header: bytes | None) -> int:
    """Return the number in a header; -1 if there is none."""
    return int(header) if header is not None and header.isdigit() else -1


async def _acknowledged(ack: Any) -> None:
    await ack
