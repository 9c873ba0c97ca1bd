"""Writes documents to the log and waits until a search finds them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from schemas.codec import Codec
from schemas.errors import EngineFailed, TriviumError
from schemas.records import Document, DocumentPassages
from schemas.retrieval import Vector, pack_vector
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.documents import send_document
from streams.log.registry import make_codec
from streams.log.retrieval.client import RetrievalClient, open_retrieval_client

_LOOK_S = 0.05
_ASK_MS = 10_000
_UNDER_WAY = 500  # documents sent and not acknowledged


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A document with text and a title, as written to the log."""

    document_id: str
    text: str
    title: str = ""


class Library:
    """Writes documents, and searches for them in the retrieval pool."""

    def __init__(
        self, log: LogSettings, codec: Codec, producer: LogProducer, client: RetrievalClient
    ) -> None:
        self._log, self._codec, self._producer = log, codec, producer
        self.client = client

    async def put(self, collection: str, texts: Iterable[TextDocument]) -> None:
        """Write all documents; return when the broker has acknowledged them."""
        await self._send_all(
            Document(
                document_id=text.document_id,
                collection=collection,
                text=text.text,
                metadata=json.dumps({"title": text.title, "source": f"{text.document_id}.md"}),
                at_ms=wall_ms(),
            )
            for text in texts
        )

    async def put_vectors(self, collection: str, vectors: Vector) -> None:
        """Write documents that have only a vector; shape (documents, dim)."""
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
        """Return a collection's passages that the log has now."""
        partitions = range(self._log.document_partitions)
        reader = AssignedReader(self._log, "passages", partitions, client_id="library-passages")
        by_document: dict[str, DocumentPassages] = {}
        async with reader.reading("earliest"):
            async for record in reader.by_time(await reader.end_offsets()):
                if not record.value:
                    continue
                passages = self._codec.decode(record.value)
                if passages.collection == collection:
                    by_document[passages.document_id] = passages
        return list(by_document.values())

    async def wait_for_all(
        self, collection: str, texts: Sequence[TextDocument], within_s: float
    ) -> None:
        """Wait until searches find all documents.

        The last document of each partition is enough; partitions are indexed independently.
        """
        count = self._log.document_partitions
        lasts = {
            partition_of(document_key(collection, text.document_id), count): text for text in texts
        }
        for last in lasts.values():
            await self.wait_for(collection, last, within_s)

    async def wait_for(self, collection: str, document: TextDocument, within_s: float) -> float:
        """Wait until a search by its own text finds the document; return the seconds."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < within_s:
            try:
                results = await self.client.search_text(
                    document.text, collection=collection, k=5, deadline_ms=wall_ms() + _ASK_MS
                )
            except TriviumError:  # no such collection yet
                await asyncio.sleep(_LOOK_S)
                continue
            for passage in results.passages:
                if passage.document_id == document.document_id and passage.text in document.text:
                    return waited_s
            await asyncio.sleep(_LOOK_S)
        raise EngineFailed(f"{document.document_id}: not found within {within_s:.0f} s")


@asynccontextmanager
async def library(log: LogSettings) -> AsyncIterator[Library]:
    """Open a library: a member of the fleet that writes documents and searches for them."""
    codec = await asyncio.to_thread(make_codec, log)
    making = LogProducer(log, codec, durable=True, client_id="library")
    async with making as producer, open_retrieval_client(log, codec, "library-asks") as client:
        yield Library(log, codec, producer, client)
