"""Puts documents on the log and waits until a search finds them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from schemas.codec import Codec
from schemas.errors import EngineFailed, TriviumError
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.log.documents import send_document
from schemas.log.registry import make_codec
from schemas.log.retrieval.asker import RetrievalClient
from schemas.log.retrieval.member import open_retrieval_client
from schemas.records import Document, DocumentPassages
from schemas.retrieval import Vector, pack_vector
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of

_LOOK_S = 0.05
_ASK_MS = 10_000
_UNDER_WAY = 500  # documents sent and not acknowledged


@dataclass(frozen=True, slots=True)
class Text:
    """A document in words."""

    document_id: str
    text: str
    title: str = ""


class Library:
    """Writes documents, and asks the pool for them."""

    def __init__(
        self, log: LogSettings, codec: Codec, producer: LogProducer, asker: RetrievalClient
    ) -> None:
        self._log, self._codec, self._producer = log, codec, producer
        self.asker = asker

    async def put(self, collection: str, texts: Iterable[Text]) -> None:
        """Write them all; returns when the broker has them."""
        await self._send_all(
            Document(
                document_id=each.document_id,
                collection=collection,
                text=each.text,
                metadata=json.dumps({"title": each.title, "source": f"{each.document_id}.md"}),
                at_ms=wall_ms(),
            )
            for each in texts
        )

    async def put_vectors(self, collection: str, vectors: Vector) -> None:
        """Likewise documents without words; shape (documents, dim)."""
        await self._send_all(
            Document(
                document_id=str(row),
                collection=collection,
                vector=pack_vector(vector),
                at_ms=wall_ms(),
            )
            for row, vector in enumerate(vectors)
        )

    async def _send_all(self, documents: Iterable[Document]) -> None:
        acks = []
        for document in documents:
            acks.append(await send_document(self._producer, self._log, document))
            if len(acks) >= _UNDER_WAY:
                await asyncio.gather(*acks)
                acks = []
        await asyncio.gather(*acks)

    async def passages(self, collection: str) -> list[DocumentPassages]:
        """What the log holds of a collection's passages now."""
        partitions = range(self._log.document_partitions)
        reader = AssignedReader(self._log, "passages", partitions, client_id="library-passages")
        held: dict[str, DocumentPassages] = {}
        async with reader.reading("earliest"):
            async for record in reader.by_time(await reader.end_offsets()):
                if not record.value:
                    continue
                passages = self._codec.decode(record.value)
                if passages.collection == collection:
                    held[passages.document_id] = passages
        return list(held.values())

    async def wait_for_all(self, collection: str, texts: Sequence[Text], within_s: float) -> None:
        """Until searches find what was written: the last of each partition, which are filled by
        themselves."""
        count = self._log.document_partitions
        lasts = {
            partition_of(document_key(collection, each.document_id), count): each for each in texts
        }
        for last in lasts.values():
            await self.wait_for(collection, last, within_s)

    async def wait_for(self, collection: str, wanted: Text, within_s: float) -> float:
        """Until a search by its own text brings it as it is; returns the seconds that took."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < within_s:
            try:
                found = await self.asker.search_text(
                    wanted.text, collection=collection, k=5, deadline_ms=wall_ms() + _ASK_MS
                )
            except TriviumError:  # no such collection yet
                await asyncio.sleep(_LOOK_S)
                continue
            for passage in found.passages:
                if passage.document_id == wanted.document_id and passage.text in wanted.text:
                    return waited_s
            await asyncio.sleep(_LOOK_S)
        raise EngineFailed(f"{wanted.document_id}: not found within {within_s:.0f} s")


@asynccontextmanager
async def library(log: LogSettings) -> AsyncIterator[Library]:
    """A member of the fleet that writes documents and searches for them."""
    codec = await asyncio.to_thread(make_codec, log)
    making = LogProducer(log, codec, durable=True, client_id="library")
    async with making as producer, open_retrieval_client(log, codec, "library-asks") as asker:
        yield Library(log, codec, producer, asker)
