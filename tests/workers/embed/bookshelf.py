"""Embedding workers on a real broker, and somebody who writes documents and reads passages."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from schemas.codec import Codec
from schemas.records import Document, DocumentPassages
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from tests.long_leases import LONG_LEASES
from tests.member_readiness import is_seen_ready
from tests.waits import until
from workers.embed.embedders.hashed import HashEmbedder
from workers.embed.embedders.protocol import Embedder
from workers.embed.settings import EmbeddingSettings
from workers.embed.worker import EmbeddingWorker

CODEC = Codec()
SETTINGS = EmbeddingSettings(chunk_tokens=12, chunk_overlap=4, model="hash", tokenizer="none")


class Bookshelf:
    """Writes documents, and reads what becomes of them."""

    def __init__(self, log: LogSettings, producer: LogProducer) -> None:
        self.log, self.producer = log, producer

    async def put(self, document_id: str, text: str = "", **fields: Any) -> None:
        collection = fields.pop("collection", "books")
        document = Document(
            document_id=document_id, collection=collection, text=text, at_ms=wall_ms(), **fields
        )
        await self.send("documents", document, document_key(collection, document_id))

    async def send(self, topic: str, record: Any, key: str, partition: int | None = None) -> None:
        if partition is None:
            partition = partition_of(key, self.log.document_partitions)
        await (await self.producer.send(topic, record, key=key, partition=partition))

    async def drop(self, document_id: str, collection: str = "books") -> None:
        await self.raw(None, document_key(collection, document_id))

    async def raw(self, value: bytes | None, key: str, topic: str = "documents") -> None:
        partition = partition_of(key, self.log.document_partitions)
        full = self.log.topic_prefix + topic
        await (await self.producer.send_raw(full, value, key=key.encode(), partition=partition))

    async def records(self, topic: str, partitions: int | None = None) -> list[Any]:
        """Return all records of a topic, undecoded."""
        count = partitions or self.log.document_partitions
        reader = AssignedReader(self.log, topic, range(count), client_id="audit")
        await reader.start("earliest")
        try:
            return await reader.read_to_end()
        finally:
            await reader.stop()

    async def passages(self) -> dict[str, DocumentPassages]:
        """Return the current passages by key."""
        by_key: dict[str, DocumentPassages] = {}
        for record in await self.records("passages"):
            key = record.key.decode()
            assert record.partition == partition_of(key, self.log.document_partitions)
            by_key.pop(key, None)
            if record.value:
                passages = CODEC.decode(record.value)
                assert isinstance(passages, DocumentPassages)
                assert key == document_key(passages.collection, passages.document_id)
                by_key[key] = passages
        return by_key

    async def texts(self, document_id: str, collection: str = "books") -> list[str]:
        document_passages = (await self.passages()).get(document_key(collection, document_id))
        return [chunk.text for chunk in document_passages.chunks] if document_passages else []

    async def shows(self, document_id: str, *texts: str) -> None:
        """Wait until a document's passages have these texts."""

        async def are_there() -> bool:
            return await self.texts(document_id) == list(texts)

        await until(are_there)

    async def dead_letter_reasons(self, topic: str) -> list[str]:
        """Return the reasons on a topic of dead letters."""
        letters = await self.records(topic + ".dlq", 1)
        return [dict(letter.headers)["x-dlq-error-message"].decode() for letter in letters]


@asynccontextmanager
async def bookshelf(log: LogSettings) -> AsyncIterator[Bookshelf]:
    producer = LogProducer(log, CODEC, durable=True, client_id="bookshelf")
    await producer.start()
    try:
        yield Bookshelf(log, producer)
    finally:
        await producer.stop()


@asynccontextmanager
async def worker(
    log: LogSettings,
    name: str,
    *,
    embedder: Embedder | None = None,
    settings: EmbeddingSettings = SETTINGS,
) -> AsyncIterator[EmbeddingWorker]:
    stop = asyncio.Event()
    running = EmbeddingWorker(log, settings, embedder or HashEmbedder(), name, CODEC)
    life = asyncio.create_task(running.run(stop))
    try:
        await until(lambda: life.done() or is_seen_ready(running.membership))
        yield running
    finally:
        stop.set()
        await life


@contextmanager
def process(log: LogSettings, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an embedding worker that can be killed, and that no stall ends."""
    env = {f"TRIVIUM_LOG_{k.upper()}": str(v) for k, v in dataclasses.asdict(log).items() if v}
    env |= LONG_LEASES
    for field in ("chunk_tokens", "chunk_overlap", "model", "tokenizer"):
        env[f"TRIVIUM_EMBEDDING_{field.upper()}"] = str(getattr(SETTINGS, field))
    env["TRIVIUM_MODEL_PATH"] = "sim"
    command = [sys.executable, "-m", "infra.cli.app", "run", "embedding", "--id", name]
    running = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
