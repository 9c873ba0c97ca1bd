"""Retrieval workers on a real broker: documents live, bad input, shards with a dead replica."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.codec import Codec
from schemas.errors import (
    DeadlineExceeded,
    EmptyIndex,
    EngineDead,
    InvalidRequest,
    InvalidVector,
    TriviumError,
    UnknownCollection,
    UnknownFilterField,
    WrongDimension,
)
from schemas.log.asker import Asker
from schemas.log.asking import asking
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.clock import wall_ms
from schemas.records import Document, MemberState, RetrievalRequest
from schemas.retrieval import Found, Hit, layout_of, pack_vector
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from tests.waiting import pass_time, until
from tests.workers.search.scenes import gaussian, nearest
from workers.search.index import Index
from workers.search.pool import RetrievalWorker
from workers.search.query import Query
from workers.search.settings import RetrievalSettings, ShardPlace

pytestmark = pytest.mark.kafka
CODEC = Codec()
DIM = 8
SETTINGS = RetrievalSettings(metrics=("books=sqeuclidean",))


class Library:
    """Writes documents, and asks."""

    def __init__(self, log: LogSettings, asker: Asker, producer: LogProducer) -> None:
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

    async def search(self, vector: Any, *, within_ms: int = 5_000, **fields: Any) -> Found:
        fields = {"collection": "books", "k": 3, **fields}
        return await self.asker.search(vector, deadline_ms=wall_ms() + within_ms, **fields)

    async def ids(self, vector: Any, **fields: Any) -> list[str]:
        return [hit.document_id for hit in (await self.search(vector, **fields)).hits]


@asynccontextmanager
async def library(log: LogSettings) -> AsyncIterator[Library]:
    producer = LogProducer(log, CODEC, durable=True, client_id="library")
    async with asking(log, CODEC, "asker") as asker:
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
        await until(lambda: life.done() or running.membership.state is MemberState.READY)
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


async def held(running: RetrievalWorker, documents: int, collection: str = "books") -> None:
    """Wait until a worker holds so many documents of a collection."""

    def there() -> bool:
        counts = {state.name: state.documents for state in running.collections.states()}
        return counts.get(collection, 0) == documents

    await until(there)


async def buried(log: LogSettings, topic: str) -> list[str]:
    """The reasons on a topic of dead letters."""
    reader = AssignedReader(log, topic + ".dlq", [0], client_id="audit")
    await reader.start("earliest")
    try:
        records = await reader.read_to_end()
    finally:
        await reader.stop()
    return [dict(record.headers)["x-dlq-error-message"].decode() for record in records]


async def test_documents_are_found_as_they_come_and_go(kafka: LogSettings, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, snapshot_folder=str(tmp_path))
    axes = {f"d{i}": row for i, row in enumerate(np.eye(DIM))}
    async with library(kafka) as books:
        async with worker(kafka, "r", settings=settings) as running:
            await ready(books, 1)
            with pytest.raises(UnknownCollection, match="no collection 'books'.* none yet"):
                await books.search(axes["d0"])
            await books.put(axes, metadata=json.dumps({"kind": "axis"}))
            await held(running, DIM)
            found = await books.search(axes["d2"], wants_seeds=True)
            assert found.hits[0] == Hit("d2", 0.0) and found.exact and found.is_complete
            assert found.seeds[0] == "d2" and set(found.seeds) <= set(axes)
            await books.put({"e": axes["d2"] * 2}, metadata=json.dumps({"kind": "own"}))
            await held(running, DIM + 1)
            assert await books.ids(axes["d2"] * 2, k=2) == ["e", "d2"]
            assert await books.ids(axes["d2"], filter='{"kind": "own"}') == ["e"]
            await books.drop("d2")
            await books.put({"d3": []}, deleted=True)
            await held(running, DIM - 1)
            assert await books.ids(axes["d2"], k=99) == ["e", "d0", "d1", "d4", "d5", "d6", "d7"]
            await books.put({"bad": axes["d2"][:3]})
            await books.put({"worse": [np.nan] * DIM})
            await books.put({"odd": axes["d2"]}, metadata="[]")
            await books.raw("documents", b"rubbish", b"books/x")
            await books.put({"last": axes["d0"]})
            await held(running, DIM)
        reasons = await buried(kafka, "documents")
        assert len(reasons) == 4
        for said in ("expected vectors of 8 values", "finite values", "a JSON object", "marker"):
            assert any(said in reason for reason in reasons), reasons
        await books.put({"after": axes["d2"]})  # into the tail, behind the snapshot
        await books.drop("d4")
        (file,) = (tmp_path / "r").glob("*.index")
        async with (
            worker(kafka, "r", settings=settings) as snapped,
            worker(kafka, "fresh") as rebuilt,
        ):
            assert sorted(index_ids(snapped)) == sorted(index_ids(rebuilt))
            assert sorted(index_ids(snapped)) == [
                "after", "d0", "d1", "d5", "d6", "d7", "e", "last",
            ]  # fmt: skip
        file.write_bytes(file.read_bytes()[:-100])
        async with worker(kafka, "r", settings=settings) as running:
            assert len(index_ids(running)) == DIM, "rebuilt from the topic"


def index_ids(running: RetrievalWorker, collection: str = "books") -> list[str]:
    view = running.collections.get(collection).view()
    return [str(view.ids[row]) for row in view.live_rows()]


BAD: list[tuple[dict[str, Any], type[TriviumError], str]] = [
    ({"vector": np.zeros(DIM - 1)}, WrongDimension, "vectors of 8 values, found shape"),
    ({"vector": [np.inf] * DIM}, InvalidVector, "finite values"),
    ({"collection": "films"}, UnknownCollection, "no collection 'films'.*: books, empty"),
    ({"collection": "empty"}, EmptyIndex, "an index with rows"),
    ({"filter": '{"colour": "red"}'}, UnknownFilterField, "no row has a field 'colour'"),
    ({"filter": "red"}, InvalidRequest, "expected a JSON object"),
    ({"k": 0}, InvalidRequest, "expected k from 1"),
    ({"k": 100_000}, InvalidRequest, "expected k from 1 to"),
    ({"top_m": -3}, InvalidRequest, "expected top_m from 1"),
    ({"width": 10_000}, InvalidRequest, "expected width from 1"),
]


async def test_bad_input_is_answered_with_its_error_and_the_pool_goes_on(
    kafka: LogSettings,
) -> None:
    vectors = {f"d{i}": row for i, row in enumerate(gaussian(20, DIM))}
    async with library(kafka) as books, worker(kafka, "r") as running:
        await ready(books, 1)
        await books.put(vectors)
        await books.put({"x": [1, 2]}, "empty")
        await held(running, 1, "empty")
        await books.drop("x", "empty")
        await held(running, 20)
        await held(running, 0, "empty")
        for fields, error, said in BAD:
            with pytest.raises(error, match=said):
                await books.search(**{"vector": vectors["d0"], **fields})
        with pytest.raises(DeadlineExceeded, match="the deadline passed"):
            await books.search(vectors["d0"], within_ms=-5)
        assert len(await books.ids(vectors["d0"], k=500)) == 20, "k > N: all there are"
        await bad_records(books, running)
        assert await books.ids(vectors["d0"], k=1, kind="prefill") == ["d0"]


async def bad_records(books: Library, running: RetrievalWorker) -> None:
    """Records that no asker writes: dead letters, or hits with an error."""
    request = RetrievalRequest(
        retrieval_id="late",
        request_id="",
        asker_id="nobody",
        reply_partition=0,
        collection="books",
        vector=bytes(4 * DIM),
        k=3,
        asked_ms=0,
        deadline_ms=wall_ms() - 1,
    )
    misses = running.serving.misses_total
    for wrong in (
        request,
        dataclasses.replace(request, reply_partition=99),
        dataclasses.replace(request, vector=b"12345"),
    ):
        await books.raw("retrieval.decode", CODEC.encode(wrong), b"q")
    await books.raw("retrieval.decode", b"rubbish", b"q")
    await books.raw("retrieval.prefill", None, b"q")

    async def all_buried() -> bool:
        reasons = await buried(books.log, "retrieval.decode")
        return len(reasons) == 3 and len(await buried(books.log, "retrieval.prefill")) == 1

    await until(all_buried)
    await until(lambda: running.serving.misses_total == misses + 1)


async def test_a_worker_that_is_stopped_while_it_loads_leaves_and_says_so(
    kafka: LogSettings,
) -> None:
    stop = asyncio.Event()
    stop.set()
    running = RetrievalWorker(kafka, SETTINGS, ShardPlace(0, 1), "early", CODEC)
    await running.run(stop)
    assert running.membership.state is MemberState.GONE
    with pytest.raises(EngineDead):
        await running.engine.search(Index.build([[0.0]]), Query(vector=[0.0], k=1))


@contextmanager
def process(log: LogSettings, name: str, place: str) -> Iterator[subprocess.Popen[bytes]]:
    """A retrieval worker that can be killed."""
    env = {f"TRIVIUM_LOG_{k.upper()}": str(v) for k, v in dataclasses.asdict(log).items() if v}
    env["TRIVIUM_RETRIEVAL_METRICS"] = ",".join(SETTINGS.metrics)
    command = [sys.executable, "-m", "infra.cli.app", "retrieval", "--shard", place, "--id", name]
    running = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


async def test_every_retrieval_is_answered_or_refused_while_a_replica_dies(
    kafka: LogSettings,
) -> None:
    count, within_ms = 120, 3_000
    vectors = gaussian(300, DIM)
    queries = gaussian(count, DIM, seed=1)
    truth = nearest(vectors, queries, 3)
    with process(kafka, "victim", "0/2") as victim:
        async with (
            library(kafka) as books,
            worker(kafka, "left", "0/2") as left,
            worker(kafka, "right-a", "1/2") as right_a,
            worker(kafka, "right-b", "1/2") as right_b,
        ):
            await ready(books, 2)
            view = books.asker.membership.view
            await until(lambda: "victim" in view.members)
            await until(lambda: view.members["victim"].state is MemberState.READY)
            await books.put({f"d{i}": row for i, row in enumerate(vectors)})

            def holds(name: str) -> int:
                load = view.members[name].search
                return sum(each.documents for each in load.collections) if load else 0

            names = ("victim", "left", "right-a", "right-b")
            await until(lambda: sum(map(holds, names)) == 2 * len(vectors))
            ended: list[Found | TriviumError] = []

            async def ask(number: int) -> None:
                try:
                    ended.append(await books.search(queries[number], within_ms=within_ms))
                except TriviumError as error:
                    ended.append(error)
                    return
                hits = [hit.document_id for hit in ended[-1].hits]  # type: ignore[union-attr]
                if ended[-1].is_complete:  # type: ignore[union-attr]
                    assert hits == [f"d{row}" for row in truth[number]]

            began_ms = wall_ms()
            async with asyncio.TaskGroup() as asking_all:
                for number in range(count):
                    asking_all.create_task(ask(number))
                    await pass_time(0.02)
                    if number == count // 4:
                        victim.kill()
            took_ms = wall_ms() - began_ms
            assert len(ended) == count
            assert took_ms < count * 20 + within_ms + 5_000
            complete = sum(isinstance(each, Found) and each.is_complete for each in ended)
            assert complete >= 0.9 * count, "the others stand in for the dead one"
            for each in (left, right_a, right_b):
                assert each.serving.searches_total > 0
