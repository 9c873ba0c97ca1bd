"""Retrieval workers on a real broker: documents live, snapshots, bad input."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import (
    DeadlineExceeded,
    EmptyIndex,
    EngineDead,
    InvalidRequest,
    InvalidVector,
    LeaseError,
    TriviumError,
    UnknownCollection,
    UnknownFilterField,
    WrongDimension,
)
from schemas.records import MemberState, RetrievalRequest
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.retrieval.results import Hit
from tests.waits import until
from tests.workers.retrieval.retrieval_workers import (
    CODEC,
    SETTINGS,
    Library,
    calm,
    dead_letter_reasons,
    library,
    ready,
    wait_for_documents,
    worker,
)
from tests.workers.vector.data import gaussian
from workers.retrieval.intake import TOPICS
from workers.retrieval.settings import ShardPlace
from workers.retrieval.worker import RetrievalWorker
from workers.vector.index.index import Index
from workers.vector.index.query import Query

pytestmark = pytest.mark.kafka
DIM = 8


@pytest.fixture(autouse=True)
async def calm_members() -> AsyncIterator[None]:
    async with calm():
        yield


async def test_worker_follows_documents_and_reads_shared_snapshot(
    kafka: LogSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another replica reads the snapshot of one that left."""
    caplog.set_level("INFO", "trivium.retrieval")
    settings = dataclasses.replace(SETTINGS, snapshot_folder=str(tmp_path), shares_snapshots=True)
    axes = {f"d{i}": row for i, row in enumerate(np.eye(DIM))}
    async with library(kafka) as books:
        async with worker(kafka, "r", settings=settings) as running:
            await ready(books, 1)
            with pytest.raises(UnknownCollection, match="no collection 'books'.* none yet"):
                await books.search(axes["d0"])
            await books.put(axes, metadata=json.dumps({"kind": "axis"}))
            await wait_for_documents(running, DIM)
            result = await books.search(axes["d2"], wants_seeds=True)
            assert result.hits[0] == Hit("d2", 0.0) and result.exact and result.is_complete
            assert result.seeds[0] == "d2" and set(result.seeds) <= set(axes)
            await books.put({"e": axes["d2"] * 2}, metadata=json.dumps({"kind": "own"}))
            await wait_for_documents(running, DIM + 1)
            assert await books.ids(axes["d2"] * 2, k=2) == ["e", "d2"]
            assert await books.ids(axes["d2"], filter='{"kind": "own"}') == ["e"]
            await books.drop("d2")
            await books.put({"d3": []}, deleted=True)
            await wait_for_documents(running, DIM - 1)
            assert await books.ids(axes["d2"], k=99) == ["e", "d0", "d1", "d4", "d5", "d6", "d7"]
            await books.put({"bad": axes["d2"][:3]})
            await books.put({"worse": [np.nan] * DIM})
            await books.put({"odd": axes["d2"]}, metadata="[]")
            await books.raw("documents", b"rubbish", b"books/x")
            await books.put({"last": axes["d0"]})
            await wait_for_documents(running, DIM)

            async def are_buried() -> bool:  # of either partition, which may be read later
                return len(await dead_letter_reasons(kafka, "documents")) == 4

            await until(are_buried)
        reasons = await dead_letter_reasons(kafka, "documents")
        assert len(reasons) == 4
        for message in ("expected vectors of 8 values", "finite values", "a JSON object", "marker"):
            assert any(message in reason for reason in reasons), reasons
        await books.put({"after": axes["d2"]})  # into the tail, behind the snapshot
        await books.drop("d4")
        (file,) = tmp_path.glob("*retrieval-0of1/*.snapshot/*.index")
        async with (
            worker(kafka, "replica", settings=settings) as snapped,
            worker(kafka, "fresh") as rebuilt,
        ):
            assert sorted(index_ids(snapped)) == sorted(index_ids(rebuilt))
            assert sorted(index_ids(snapped)) == [
                "after", "d0", "d1", "d5", "d6", "d7", "e", "last",
            ]  # fmt: skip
        assert f"{file}: {DIM} rows of books" in caplog.text
        for file in tmp_path.glob("*/*.snapshot/*.index"):
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


async def test_worker_answers_bad_requests_with_errors_and_continues(
    kafka: LogSettings,
) -> None:
    vectors = {f"d{i}": row for i, row in enumerate(gaussian(20, DIM))}
    async with library(kafka) as books, worker(kafka, "r") as running:
        await ready(books, 1)
        await books.put(vectors)
        await books.put({"x": [1, 2]}, "empty")
        await wait_for_documents(running, 1, "empty")
        await books.drop("x", "empty")
        await wait_for_documents(running, 20)
        await wait_for_documents(running, 0, "empty")
        for fields, error, message in BAD:
            with pytest.raises(error, match=message):
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
    misses = running.responder.tallies.misses
    for wrong in (
        request,
        dataclasses.replace(request, reply_partition=99),
        dataclasses.replace(request, vector=b"12345"),
    ):
        await books.raw("retrieval.decode", CODEC.encode(wrong), b"q")
    await books.raw("retrieval.decode", b"rubbish", b"q")
    await books.raw("retrieval.prefill", None, b"q")

    async def all_buried() -> bool:  # what a rebalance has the worker read again is buried again
        reasons = {topic: await dead_letter_reasons(books.log, topic) for topic in TOPICS}
        return [len(set(reasons[topic])) for topic in TOPICS] == [1, 3]

    await until(all_buried)
    await until(lambda: running.responder.tallies.misses > misses)


async def test_worker_keeps_documents_after_lost_lease(
    kafka: LogSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """It joins again in a higher epoch, and continues where it stood."""
    caplog.set_level("INFO", "trivium.retrieval")
    vectors = {f"d{i}": row for i, row in enumerate(gaussian(20, DIM))}
    async with library(kafka) as books, worker(kafka, "r") as running:
        await ready(books, 1)
        await books.put(vectors)
        await wait_for_documents(running, 20)
        with_dimension = len(vectors) + 1  # which the worker itself writes beside the documents
        await until(lambda: sum(running._documents.offsets.values()) == with_dimension)
        index, former = running.collections.get("books"), running.membership
        running._life.tasks.spawn("cut", _lose_lease())
        await until(lambda: running.membership is not former)
        await until(lambda: running.membership.state is MemberState.READY)
        assert running.membership.epoch > former.epoch
        assert running.collections.get("books") is index
        messages = [r.getMessage() for r in caplog.records if r.msg.startswith("read ")]
        assert "read 0 records of documents" in messages[-2]
        await books.put({"late": vectors["d0"]})
        await wait_for_documents(running, 21)
        await ready(books, 1)
        assert set(await books.ids(vectors["d0"], k=2)) == {"d0", "late"}


async def _lose_lease() -> None:
    raise LeaseError("silent for too long")


async def test_worker_stopped_during_load_leaves_fleet(
    kafka: LogSettings,
) -> None:
    stop = asyncio.Event()
    stop.set()
    running = RetrievalWorker(kafka, SETTINGS, ShardPlace(0, 1), "early", CODEC)
    await running.run(stop)
    assert running.membership.state is MemberState.GONE
    with pytest.raises(EngineDead):
        await running.engine.search(Index.build([[0.0]]), Query(vector=[0.0], k=1))


async def test_unusable_documents_become_dead_letters_once(
    kafka: LogSettings,
) -> None:
    async def are_buried(count: int) -> bool:
        return len(await dead_letter_reasons(kafka, "documents")) == count

    async with library(kafka) as books:
        await books.put({"bad": [np.nan] * DIM, "good": np.ones(DIM)})
        await books.raw("documents", b"rubbish", b"books/x")
        async with worker(kafka, "first") as first, worker(kafka, "second") as second:
            await wait_for_documents(second, 1)
            await until(lambda: are_buried(2))
            # On the partition of `good`, so that no reader meets the wrong length first.
            await books.put({"short": np.ones(DIM - 1), "better": np.ones(DIM)})
            await wait_for_documents(second, 2)
            await until(lambda: are_buried(3))
            refusals = [replica._documents.refusals for replica in (first, second)]
            await until(lambda: not any(shard_refusals._waiting for shard_refusals in refusals))
        async with worker(kafka, "second"):
            pass
        assert await are_buried(3)
