"""The engine on a CUDA device, from `search` to kernels: real where there is one, and emulated."""

import asyncio
import os
from collections.abc import AsyncIterator

import numpy as np
import pytest

from schemas.errors import DeadlineExceeded, EngineDead, InvalidRequest
from schemas.records import Document
from schemas.retrieval import pack_vector
from tests.workers.vector.cuda.batch_searches import SIZES
from tests.workers.vector.data import clustered_index, gaussian
from tests.workers.vector.engine.test_engine import assert_nothing_is_left
from tests.workers.vector.engine.test_engine_links import through
from workers.retrieval import upkeep
from workers.retrieval.collections import Collections
from workers.retrieval.passages.changes import DocumentChange
from workers.retrieval.settings import RetrievalSettings
from workers.vector.cuda import builder
from workers.vector.cuda.device import Device
from workers.vector.engine import backend
from workers.vector.engine.cuda_lanes import CudaLanes
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.filters.filters import EqualFilter
from workers.vector.index import inputs
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Effort, Query
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import Metric

QUERIES = gaussian(60, 20, seed=6)
SETTINGS = EngineSettings(device="cuda", cuda=SIZES, top_m_max=96, k_max=200)


@pytest.fixture(scope="module")
def index() -> Index:
    index = clustered_index(2_000)
    index.delete(range(0, 2_000, 9))
    return index


@pytest.fixture
async def engine(device: Device, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SearchEngine]:
    devices = {"cuda": device}
    monkeypatch.setattr(backend, "cuda_device", lambda name, _number=0: devices.get(name))
    engine = SearchEngine(SETTINGS)
    assert engine.backend == "cuda"
    yield engine
    await engine.close()


@pytest.fixture
async def cpu() -> AsyncIterator[SearchEngine]:
    engine = SearchEngine(EngineSettings(lanes=1, top_m_max=96, k_max=200))
    yield engine
    await engine.close()


async def test_cuda_engine_answers_equal_cpu(
    engine: SearchEngine, cpu: SearchEngine, index: Index
) -> None:
    """Searches of all classes, with filters, warm starts and scans, outnumber the slots."""
    where = [None, EqualFilter("part", 3), ~EqualFilter("part", 4)]
    queries = [
        Query(
            vector=vector, k=1 + i % 40, top_m=20 + i % 50, width=1 + i % 3, where=where[i % 3],
            kind=list(SearchKind)[i % 3], seeds=(5, 6, 70) if i % 4 == 0 else (),
        )
        for i, vector in enumerate(QUERIES)
    ]  # fmt: skip
    answers, cpu_answers = [
        await asyncio.gather(*(searcher.search(index, query) for query in queries))
        for searcher in (engine, cpu)
    ]
    for answer, expected in zip(answers, cpu_answers, strict=True):
        assert answer.ids == expected.ids
        assert answer.distances.tobytes() == expected.distances.tobytes()
        assert answer.top_keys.tobytes() == expected.top_keys.tobytes()
        assert (answer.exact, answer.extends) == (expected.exact, expected.extends)
    assert_nothing_is_left(engine)
    assert engine.load().searches_total == len(queries)
    assert engine.stats().extends > 0


@pytest.mark.parametrize("together", [7, 64])
async def test_cuda_engine_bulk_search_equals_cpu(
    engine: SearchEngine, cpu: SearchEngine, index: Index, together: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One slot takes all queries, or several share them."""
    monkeypatch.setattr(CudaLanes, "feed_queries", together)
    effort = Effort(k=7, top_m=32)
    view, prepared = index.view(), inputs.prepare(QUERIES, 20, index.metric)
    rows, cpu_rows = [
        await searcher.neighbours(view, prepared, effort) for searcher in (engine, cpu)
    ]
    assert rows.tobytes() == cpu_rows.tobytes()
    assert engine.load().searches_total == -(-len(QUERIES) // together)
    assert_nothing_is_left(engine)


async def test_cuda_lane_takes_long_turns_for_few_searches(
    engine: SearchEngine, index: Index
) -> None:
    """A lone search waits for launches above all."""
    for vector in QUERIES[:4]:
        await engine.search(index, Query(vector=vector, k=3, top_m=30))
        assert engine.stats().extends % SIZES.steps[-1] == 0


async def test_cuda_engine_scans_after_failed_walk(engine: SearchEngine, cpu: SearchEngine) -> None:
    index = clustered_index(1_800)
    index.delete([i for i in range(1_800) if i % 60])
    query = Query(vector=QUERIES[0], k=20, top_m=20)
    answer, expected = await engine.search(index, query), await cpu.search(index, query)
    assert answer.exact
    assert answer.ids == expected.ids


async def test_cuda_engine_searches_changing_index(engine: SearchEngine, cpu: SearchEngine) -> None:
    index = clustered_index(1_500)
    for round_ in range(4):
        index.upsert([10_000 + round_], QUERIES[[round_]])
        answer = await engine.search(index, Query(vector=QUERIES[round_], k=3))
        assert answer.ids[0] == 10_000 + round_
        index.delete([10_000 + round_])
        assert (
            10_000 + round_
            not in (await engine.search(index, Query(vector=QUERIES[round_], k=3))).ids
        )


async def test_cuda_engine_links_rows_during_searches(
    engine: SearchEngine, cpu: SearchEngine
) -> None:
    """Graph versions change beside the searches; the graph equals that of the cores."""
    index, alone = clustered_index(1_200), clustered_index(1_200)
    queries = [Query(vector=vector, k=4, top_m=24) for vector in QUERIES[:12]]
    for number in range(5):
        for target in (index, alone):
            target.upsert(range(9_000 + 20 * number, 9_020 + 20 * number), gaussian(20, 20, number))
        linking = asyncio.ensure_future(
            asyncio.to_thread(index.link, neighbours=through(engine), batch=15)
        )
        answers_during_link = await asyncio.gather(
            *(engine.search(index, query) for query in queries)
        )
        assert all(len(answer.ids) == 4 for answer in answers_during_link)
        assert await linking == alone.link(batch=15)
        assert index.graph.tobytes() == alone.graph.tobytes()
        answers = await asyncio.gather(*(engine.search(index, query) for query in queries))
        for query, answer in zip(queries, answers, strict=True):
            expected = await cpu.search(alone, query)
            assert answer.ids == expected.ids
            assert answer.distances.tobytes() == expected.distances.tobytes()


async def test_cuda_engine_frees_slots_of_cancelled_searches(
    engine: SearchEngine, index: Index
) -> None:
    searches = [
        asyncio.ensure_future(engine.search(index, Query(vector=vector, k=5, top_m=64)))
        for vector in QUERIES
    ]
    prepared = inputs.prepare(QUERIES, 20, index.metric)
    bulk = asyncio.ensure_future(engine.neighbours(index.view(), prepared, Effort(k=5)))
    await asyncio.gather(*searches[:3])
    for task in (*searches[3:], bulk):
        task.cancel()
    await asyncio.gather(*searches, bulk, return_exceptions=True)
    answer = await engine.search(index, Query(vector=QUERIES[0], k=5))
    assert len(answer.ids) == 5
    with pytest.raises(DeadlineExceeded):
        await engine.search(index, Query(vector=QUERIES[0], deadline_ms=1))


async def test_cuda_engine_rejects_searches_beyond_its_sizes(
    engine: SearchEngine, index: Index
) -> None:
    with pytest.raises(InvalidRequest, match="expected width from 1 to 16, found 17"):
        await engine.search(index, Query(vector=QUERIES[0], width=17))  # of 16 edges each
    wide = Index.build(gaussian(5, 300))
    with pytest.raises(InvalidRequest, match="expected vectors of up to 256 values, found 300"):
        await engine.search(wide, Query(vector=np.zeros(300)))


async def test_cuda_lane_thread_yields_to_event_loop(engine: SearchEngine, index: Index) -> None:
    await engine.search(index, Query(vector=QUERIES[0]))
    lanes = engine._dispatcher.lanes
    assert isinstance(lanes, CudaLanes)
    assert os.sched_getscheduler(lanes._thread.native_id or 0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_cuda_engine_close_ends_waiting_searches(
    device: Device, monkeypatch: pytest.MonkeyPatch, index: Index
) -> None:
    monkeypatch.setattr(backend, "cuda_device", lambda *_: device)
    engine = SearchEngine(SETTINGS)
    waiting = [
        asyncio.ensure_future(engine.search(index, Query(vector=vector))) for vector in QUERIES
    ]
    await engine.search(index, Query(vector=QUERIES[0]))
    await engine.close()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert not isinstance(outcome, BaseException) or isinstance(outcome, EngineDead)


async def test_cuda_device_builds_collection_during_searches(
    engine: SearchEngine, device: Device, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder opens the device again: its launches wait for no turn."""
    monkeypatch.setattr(builder, "THREADS", 32)
    monkeypatch.setattr(upkeep, "SCANNED_ROWS_MAX", 100)
    settings, vectors = RetrievalSettings(degree=8), gaussian(240, 10)
    graph_of = backend.or_on_cores(builder.graph_on(type(device)()))
    collections = Collections(settings, graph_of)
    assert collections.apply(documents(vectors)) == []
    built = asyncio.create_task(upkeep.Upkeep(settings, collections, engine.neighbours).finish())
    searches = 0
    while not built.done():
        await asyncio.gather(
            *(engine.search(index, Query(vector=vector)) for vector in QUERIES[:8])
        )
        searches += 8
    await built
    on_cores = Index.build(vectors, metric=Metric.COSINE, degree=8, ids=names(vectors))
    assert collections.get("books").graph.tobytes() == on_cores.graph.tobytes()
    assert searches and engine.load().searches_total == searches


def names(vectors: Array) -> list[str]:
    return [f"d{number}" for number in range(len(vectors))]


def documents(vectors: Array) -> list[DocumentChange]:
    changes = []
    for name, vector in zip(names(vectors), vectors, strict=True):
        document = Document(
            document_id=name, collection="books", vector=pack_vector(vector), at_ms=0
        )
        changes.append(DocumentChange("books", name, document))
    return changes
