"""Retrieval workers on a real broker, and somebody who writes documents and asks."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from schemas.codec import Codec
from schemas.records import Document
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.retrieval.client import RetrievalClient, open_retrieval_client
from streams.log.retrieval.results import RetrievalResult, layout_of
from tests.long_leases import LONG_LEASES, long_leases
from tests.member_readiness import is_seen_ready
from tests.waits import until
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.worker import RetrievalWorker
from workers.vector.engine.engine import EngineSettings, SearchEngine

CODEC = Codec()
SETTINGS = RetrievalSettings(metrics=("books=sqeuclidean",))


@asynccontextmanager
async def calm() -> AsyncIterator[None]:
    """Members share a loop here, and are silent while it compiles a kernel or stalls: most is
    compiled before anybody joins, and no lease ends."""
    await SearchEngine(EngineSettings(lanes=1)).close()
    with long_leases():
        yield


class Library:
    """Writes documents, and asks."""

    def __init__(self, log: LogSettings, asker: RetrievalClient, producer: LogProducer) -> None:
        self.log, self.asker, self.producer = log, asker, producer

    async def put(
        self, vectors: Mapping[str, Any], collection: str = "books", **fields: Any
    ) -> None:
        acks = []
        for document_id, vector in vectors.items():
            document = Document(
                document_id=document_id,
                collection=collection,
                vector=pack_vector(vector),
                at_ms=wall_ms(),
                **fields,
            )
            acks.append(await self._send(document_key(collection, document_id), document))
        await asyncio.gather(*acks)

    async def _send(self, key: str, document: Document) -> Any:
        partition = partition_of(key, self.log.document_partitions)
        return await self.producer.send("documents", document, key=key, partition=partition)

    async def raw(self, topic: str, value: bytes | None, key: bytes, partition: int = 0) -> None:
        full = self.log.topic_prefix + topic
        await (await self.producer.send_raw(full, value, key=key, partition=partition))

    async def drop(self, document_id: str, collection: str = "books") -> None:
        key = document_key(collection, document_id)
        partition = partition_of(key, self.log.document_partitions)
        await self.raw("documents", None, key.encode(), partition)

    async def search(
        self, vector: Any, *, within_ms: int = 60_000, **fields: Any
    ) -> RetrievalResult:
        fields = {"collection": "books", "k": 3, **fields}
        return await self.asker.search(vector, deadline_ms=wall_ms() + within_ms, **fields)

    async def ids(self, vector: Any, **fields: Any) -> list[str]:
        return [hit.document_id for hit in (await self.search(vector, **fields)).hits]


@asynccontextmanager
async def library(log: LogSettings) -> AsyncIterator[Library]:
    producer = LogProducer(log, CODEC, durable=True, client_id="library")
    async with open_retrieval_client(log, CODEC, "asker") as asker:
        await producer.start()
        try:
            yield Library(log, asker, producer)
        finally:
            await producer.stop()


@asynccontextmanager
async def worker(
    log: LogSettings, name: str, place: str = "0/1", settings: RetrievalSettings = SETTINGS
) -> AsyncIterator[RetrievalWorker]:
    stop = asyncio.Event()
    running = RetrievalWorker(log, settings, ShardPlace.parse(place), name, CODEC)
    life = asyncio.create_task(running.run(stop))
    try:
        await until(lambda: life.done() or is_seen_ready(running.membership))
        yield running
    finally:
        stop.set()
        await life


async def ready(books: Library, shards: int) -> None:
    """Wait until the asker sees all shards."""

    def all_there() -> bool:
        layout = layout_of(books.asker.membership.view, wall_ms())
        return layout.shards == shards == len(layout.living)

    await until(all_there)


async def wait_for_documents(
    running: RetrievalWorker, documents: int, collection: str = "books"
) -> None:
    """Wait until a worker holds so many documents of a collection."""

    def there() -> bool:
        counts = {state.name: state.documents for state in running.collections.states()}
        return counts.get(collection, 0) == documents

    await until(there)


async def dead_letter_reasons(log: LogSettings, topic: str) -> list[str]:
    """The reasons on a topic of dead letters."""
    reader = AssignedReader(log, topic + ".dlq", [0], client_id="audit")
    await reader.start("earliest")
    try:
        records = await reader.read_to_end()
    finally:
        await reader.stop()
    return [dict(record.headers)["x-dlq-error-message"].decode() for record in records]


@contextmanager
def process(log: LogSettings, name: str, place: str) -> Iterator[subprocess.Popen[bytes]]:
    """A retrieval worker that can be killed, and is not ended by a stall before."""
    env = {f"TRIVIUM_LOG_{k.upper()}": str(v) for k, v in dataclasses.asdict(log).items() if v}
    env |= LONG_LEASES
    env["TRIVIUM_RETRIEVAL_METRICS"] = ",".join(SETTINGS.metrics)
    program = [sys.executable, "-m", "infra.cli.app", "run", "retrieval"]
    command = [*program, "--shard", place, "--id", name]
    running = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
