"""Writes documents to the log, and tells what has become of them: embedded, unchanged, refused.

Embedding workers write a document's passages, or a dead letter, or nothing where its passages are
there already, and acknowledge it then. So a document is done when its passages are seen, or when
its group has read on.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.connecting import asking_client
from schemas.log.documents import KEPT, embedding_group, send_document
from schemas.log.slices import in_slices
from schemas.records import Document, DocumentPassages
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_SUFFIX, document_key, partition_of

_UNDER_WAY = 500  # sent and not acknowledged
_LOOK_MS = 300
_TOPIC = "documents"
_ORIGIN = ("x-dlq-partition", "x-dlq-offset")
Place = tuple[int, int]  # partition and offset
Done = Callable[[str], None]


@dataclass(slots=True)
class Fates:
    """Of the documents of one call."""

    written: int = 0
    deleted: int = 0
    embedded: int = 0
    passages: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)  # id and reason
    done: int = 0

    @property
    def unchanged(self) -> int:
        """Read by a worker that had nothing to do."""
        return self.done - self.embedded - len(self.refused)

    @property
    def waiting(self) -> int:
        return self.written - self.done


class Ingester:
    """`start`, then `put` and `drop`, then `follow` as long as one wants to know; then `stop`."""

    def __init__(self, log: LogSettings, codec: Codec) -> None:
        self.fates = Fates()
        self._log, self._codec = log, codec
        self._producer = LogProducer(log, codec, durable=True, client_id="trivium-ingest")
        partitions = range(log.document_partitions)
        self._passages = AssignedReader(log, "passages", partitions, client_id="trivium-ingest")
        letters = _TOPIC + DEAD_LETTER_SUFFIX
        self._letters = AssignedReader(log, letters, [0], client_id="trivium-ingest-letters")
        self._acks: list[Any] = []
        self._open: dict[Place, tuple[str, Done]] = {}  # documents of which nothing is known yet

    async def start(self) -> None:
        """Raises BrokerUnavailable. What comes from now on is seen."""
        await self._producer.start()
        await self._passages.start("latest")
        await self._letters.start("latest")

    async def stop(self) -> None:
        """Close."""
        await self._producer.stop()
        await self._passages.stop()
        await self._letters.stop()

    async def put(self, document: Document, done: Done = lambda reason: None) -> None:
        """`done` hears why it was refused, nothing if it was not, once `follow` knows.

        Raises RecordTooLarge, BrokerUnavailable.
        """
        ack = await send_document(self._producer, self._log, document)
        self.fates.written += 1
        await self._add(self._sent(document.document_id, done, ack))

    async def drop(self, collection: str, document_id: str) -> None:
        """A tombstone."""
        key = document_key(collection, document_id)
        partition = partition_of(key, self._log.document_partitions)
        topic = self._log.topic_prefix + _TOPIC
        ack = await self._producer.send_raw(topic, None, key=key.encode(), partition=partition)
        self.fates.deleted += 1
        await self._add(_acknowledged(ack))

    async def _add(self, sending: Any) -> None:
        self._acks.append(asyncio.ensure_future(sending))
        if len(self._acks) >= _UNDER_WAY:
            await self.flush()

    async def flush(self) -> None:
        """Wait until the broker has all that was written."""
        acks, self._acks = self._acks, []
        await asyncio.gather(*acks)

    async def _sent(self, document_id: str, done: Done, ack: Any) -> None:
        place = await ack
        self._open[int(place.partition), int(place.offset)] = (document_id, done)

    async def follow(self, told: Callable[[Fates], None]) -> None:
        """Until all that was written is done; `told` hears of every change."""
        await self.flush()
        topic, count = self._log.topic_prefix + _TOPIC, self._log.document_partitions
        places = [TopicPartition(topic, partition) for partition in range(count)]
        async with asking_client(self._log, embedding_group(self._log)) as asking:
            asking.assign(places)
            while self._open:
                records = await self._passages.batch(timeout_ms=_LOOK_MS)
                await self._made(records)
                if not records:
                    await self._look({tp.partition: await asking.committed(tp) for tp in places})
                told(self.fates)

    async def _look(self, committed: dict[int, int | None]) -> None:
        """How far the group has read: passages and dead letters were written before that."""
        for record in await self._letters.read_to_end():
            said = dict(record.headers)
            partition, offset = (_number(said.get(name)) for name in _ORIGIN)
            reason = said.get("x-dlq-error-message", b"").decode(errors="replace")
            self._close((partition, offset), reason or "it cannot be used")
        await self._made(await self._passages.read_to_end())
        for partition, offset in list(self._open):
            if offset < (committed.get(partition) or 0):
                self._close((partition, offset))

    async def _made(self, records: list[ConsumerRecord]) -> None:
        async for record in in_slices(records):
            if not record.value:
                continue
            try:
                passages = self._codec.decode(record.value)
            except RecordError:  # somebody else's, which retrieval workers bury
                continue
            if not isinstance(passages, DocumentPassages):
                continue
            was_open = self._close((record.partition, passages.documents_offset))
            if was_open and KEPT not in record.headers:
                self.fates.embedded += 1
                self.fates.passages += len(passages.chunks)

    def _close(self, place: Place, refused: str = "") -> bool:
        """Whether anybody waited for it."""
        document_id, done = self._open.pop(place, ("", None))
        if done is None:
            return False
        self.fates.done += 1
        if refused:
            self.fates.refused.append((document_id, refused))
        done(refused)
        return True


def _number(said: bytes | None) -> int:
    """Of a header; -1 where it says none."""
    return int(said) if said is not None and said.isdigit() else -1


async def _acknowledged(ack: Any) -> None:
    await ack
