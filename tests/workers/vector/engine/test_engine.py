"""The engine as its callers see it: answers, deadlines, cancellation, bounds, nothing left over."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from schemas.errors import DeadlineExceeded, EngineDead, InvalidRequest, QueueFull, WrongDimension
from tests.waits import until
from tests.workers.vector.data import clustered_index, gaussian, nearest, recall
from workers.vector.engine.core_lanes import CoreLanes
from workers.vector.engine.engine import EngineSettings, SearchEngine
from workers.vector.engine.lane_loop import END, RUN
from workers.vector.engine.queues import NEVER_MS
from workers.vector.engine.scheduler import SchedulerSettings
from workers.vector.filters.filters import CompiledFilters, EqualFilter, OneOfFilter, RangeFilter
from workers.vector.index import inputs, plans, view
from workers.vector.index.index import Index
from workers.vector.index.kinds import SearchKind
from workers.vector.index.query import Effort, Query

QUERIES = gaussian(64, 20, seed=2)


@pytest.fixture(scope="module")
def index() -> Index:
    return clustered_index()


@pytest.fixture
async def engine() -> AsyncIterator[SearchEngine]:
    engine = SearchEngine(EngineSettings(lanes=2, places=4, slots=8))
    yield engine
    await engine.close()


def assert_nothing_is_left(engine: SearchEngine) -> None:
    dispatcher = engine._dispatcher
    occupancy = dispatcher.occupancy
    assert occupancy.in_places == len(occupancy.parked) == len(dispatcher.scheduler) == 0
    assert occupancy.active == [0] * dispatcher.lanes.count
    assert not dispatcher._slots.fields.any()
    assert sorted(sum(occupancy.free, [])) == list(range(dispatcher._slots.count))


async def linked(engine: SearchEngine, index: Index, queries: Any, effort: Effort) -> Any:
    """Rows that the engine finds for an array of queries."""
    view = index.view()
    prepared = inputs.prepare(queries, view.dim, view.metric)
    return await engine.neighbours(view, prepared, effort)


async def test_engine_single_and_bulk_searches_agree(engine: SearchEngine, index: Index) -> None:
    rows, distances = index.search(QUERIES, Effort(k=5))
    assert (await linked(engine, index, QUERIES, Effort(k=5))).tobytes() == rows.tobytes()
    answers = await asyncio.gather(
        *(
            engine.search(index, Query(vector=query, k=5, kind=list(SearchKind)[i % 3]))
            for i, query in enumerate(QUERIES)
        )
    )  # fmt: skip
    for answer, row, far in zip(answers, rows, distances, strict=True):
        assert answer.rows.tobytes() == row.tobytes()
        assert answer.distances.tobytes() == far.tobytes()
        assert answer.ids == row.tolist()
        assert not answer.exact
    assert engine.load().searches_total >= len(QUERIES)
    assert_nothing_is_left(engine)


async def test_engine_searches_several_indexes_in_one_batch(
    engine: SearchEngine, index: Index
) -> None:
    small_index = Index.build(gaussian(40, 7), [f"row {i}" for i in range(40)])
    queries = gaussian(30, 7, seed=8)
    answers = await asyncio.gather(
        *(engine.search(index, Query(vector=q)) for q in QUERIES[:30]),
        *(engine.search(small_index, Query(vector=q, k=3)) for q in queries),
    )
    truth = nearest(small_index.rows.vectors[:40, :7], queries, 3)
    for answer, expected in zip(answers[30:], truth.tolist(), strict=True):
        assert answer.ids == [f"row {i}" for i in expected]
        assert answer.exact


async def test_engine_warm_start_keeps_recall_of_drifting_probes(
    engine: SearchEngine, index: Index
) -> None:
    """Each probe begins at the routing list of the one before."""
    drift = np.random.default_rng(1)
    query = index.rows.vectors[7, :20].copy()
    seeds: Any = ()
    rows, truth = [], []
    for _ in range(12):
        query = query + 0.05 * drift.standard_normal(20).astype(np.float32)
        answer = await engine.search(index, Query(vector=query, top_m=24, seeds=seeds))
        seeds = answer.top
        assert answer.top_ids()[:10] == answer.ids
        rows.append(answer.rows)
        truth.append(nearest(index.rows.vectors[:3_000, :20], query[None], 10)[0])
    assert recall(np.array(rows), np.array(truth)) >= 0.97


async def test_engine_ignores_stale_and_foreign_seeds(engine: SearchEngine, index: Index) -> None:
    cold = await engine.search(index, Query(vector=QUERIES[0], top_m=128))
    seeds = [-5, 10**9, 3, 3, 2_999, 3_000]
    warm = await engine.search(index, Query(vector=QUERIES[0], top_m=128, seeds=seeds))
    assert warm.ids == cold.ids


async def test_engine_rejects_bad_requests_at_once(engine: SearchEngine, index: Index) -> None:
    with pytest.raises(WrongDimension):
        await engine.search(index, Query(vector=[1.0]))
    with pytest.raises(InvalidRequest, match="expected top_m from 1 to 2048, found 2049"):
        await engine.search(index, Query(vector=QUERIES[0], top_m=2_049))
    assert (await linked(engine, index, np.empty((0, 20)), Effort())).shape == (0, 10)
    assert_nothing_is_left(engine)


class Clock:
    """Time that stands still until it is moved."""

    now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms


class Ticking:
    """A clock that moves whenever it is read."""

    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return float(self.reads)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slot of the first search that a lane is given: it stands still until it is given up."""
    slots: list[int] = []
    start, tell = CoreLanes.start, CoreLanes.tell

    def started(lanes: CoreLanes, slot: int, search: plans.PreparedSearch) -> None:
        if slots:
            start(lanes, slot, search)
        else:
            slots.append(slot)
            search.enter(lanes._slots, slot)

    def release_and_tell(lanes: CoreLanes, slot: int, kind: int) -> None:
        if slots == [slot] and kind == END:
            slots[0] = -1
            tell(lanes, slot, RUN)
        tell(lanes, slot, kind)

    monkeypatch.setattr(CoreLanes, "start", started)
    monkeypatch.setattr(CoreLanes, "tell", release_and_tell)
    return slots


async def test_engine_deadline_ends_running_and_waiting_searches(
    index: Index, held_up: list[int]
) -> None:
    clock = Clock()
    engine = SearchEngine(EngineSettings(lanes=1, places=1, slots=1), clock_ms=clock)
    long = asyncio.create_task(engine.search(index, Query(vector=QUERIES[0], deadline_ms=2)))
    await until(lambda: engine.load().running == 1)
    behind = asyncio.create_task(engine.search(index, Query(vector=QUERIES[0])))
    last = asyncio.create_task(engine.search(index, Query(vector=QUERIES[0], deadline_ms=1)))
    await until(lambda: engine.load().waiting[SearchKind.DECODE] == 2)
    clock.now_ms = 1.0
    with pytest.raises(DeadlineExceeded, match="before the search had a slot"):
        await last
    assert not long.done()
    assert engine.load().waiting[SearchKind.DECODE] == 1
    clock.now_ms = 2.0
    with pytest.raises(DeadlineExceeded, match="during the search"):
        await long
    assert len((await behind).rows) == 10 and held_up == [-1]
    with pytest.raises(DeadlineExceeded, match="before the search had a slot"):
        await engine.search(index, Query(vector=QUERIES[0], deadline_ms=0))
    assert_nothing_is_left(engine)
    await engine.close()


async def test_engine_ends_each_search_at_its_own_deadline(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines are in no order: cancelled searches and those without one are skipped."""
    monkeypatch.setattr(CoreLanes, "start", lambda lanes, slot, search: None)  # none ends by itself
    clock, deadlines = Clock(), [3, 1, None, 2, 1]
    engine = SearchEngine(EngineSettings(lanes=1, places=8, slots=8), clock_ms=clock)
    tasks = [
        asyncio.create_task(engine.search(index, Query(vector=QUERIES[0], deadline_ms=deadline_ms)))
        for deadline_ms in deadlines
    ]
    await until(lambda: engine.load().running == 5)
    tasks[4].cancel()
    for now_ms, over in ((1, 1), (2, 3), (3, 0)):
        assert not tasks[over].done()
        clock.now_ms = now_ms
        with pytest.raises(DeadlineExceeded, match="during the search"):
            await tasks[over]
    assert engine._dispatcher._next_deadline_ms == NEVER_MS and not tasks[2].done()
    await engine.close()
    with pytest.raises(EngineDead):
        await tasks[2]
    assert_nothing_is_left(engine)


async def test_engine_reads_clock_once_per_tick_for_waiting_searches(index: Index) -> None:
    """The first arrival that has to wait reads the time for those behind it."""
    clock = Ticking()
    engine = SearchEngine(EngineSettings(lanes=1, places=1, slots=1), clock_ms=clock)
    tasks = [asyncio.create_task(engine.search(index, Query(vector=q))) for q in QUERIES[:9]]
    await asyncio.sleep(0)  # all have asked, and no turn was taken
    assert clock.reads == 2, "for who goes to a lane at once, and for the first who waits"
    waits = [item.arrived_ms for item in engine._dispatcher.scheduler.queues.decode]
    assert waits == [2.0] * 8
    await asyncio.gather(*tasks)
    assert_nothing_is_left(engine)
    await engine.close()


async def test_engine_frees_slot_of_cancelled_search(index: Index, held_up: list[int]) -> None:
    engine = SearchEngine(EngineSettings(lanes=1, places=1, slots=1))
    query = Query(vector=QUERIES[0])
    many = [asyncio.create_task(engine.search(index, query)) for _ in range(3)]
    await until(
        lambda: engine.load().running == 1 and engine.load().waiting[SearchKind.DECODE] == 2
    )
    last = asyncio.create_task(engine.search(index, query))
    await asyncio.sleep(0)
    for task in many:
        task.cancel()
    assert (await last).rows.tolist() == index.search(QUERIES[:1])[0][0].tolist()
    assert held_up == [-1]
    assert all(isinstance(outcome, asyncio.CancelledError)
               for outcome in await asyncio.gather(*many, return_exceptions=True))  # fmt: skip
    assert engine.load().searches_total == 1
    assert_nothing_is_left(engine)
    await engine.close()


async def test_engine_bounds_queue_and_closes(index: Index) -> None:
    scheduler = SchedulerSettings(queue_max=3)
    engine = SearchEngine(
        EngineSettings(lanes=1, places=1, slots=1, extends_max=1, inbox_max=5, scheduler=scheduler)
    )
    tasks = [asyncio.create_task(engine.search(index, Query(vector=q, top_m=512))) for q in QUERIES]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert refused
    assert len(refused) < len(outcomes)
    late = asyncio.create_task(engine.search(index, Query(vector=QUERIES[0], top_m=512)))
    await asyncio.sleep(0)
    await engine.close()
    await asyncio.gather(late, return_exceptions=True)
    with pytest.raises(EngineDead):
        await engine.search(index, Query(vector=QUERIES[0]))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("search")]


async def test_engine_starts_some_arrivals_at_once_and_urgent_ones_first(
    index: Index,
) -> None:
    half = SchedulerSettings(share=0.5)
    engine = SearchEngine(
        EngineSettings(lanes=1, places=16, slots=16, extends_max=1, scheduler=half)
    )
    kinds = [SearchKind.DECODE] * 60 + [SearchKind.PREFILL] * 8
    tasks = [
        asyncio.create_task(engine.search(index, Query(vector=QUERIES[0], kind=kind)))
        for kind in kinds
    ]
    await asyncio.sleep(0)  # all have asked, and no turn was taken
    load = engine.load()
    assert load.running == 8
    assert load.waiting[SearchKind.DECODE] == 52
    assert load.waiting[SearchKind.PREFILL] == 8
    await asyncio.sleep(0)  # one turn: the share of free places that is prefill's
    assert engine.load().waiting[SearchKind.PREFILL] <= 4
    await asyncio.gather(*tasks)
    assert_nothing_is_left(engine)
    await engine.close()


async def test_engine_lanes_yield_to_event_loop(engine: SearchEngine, index: Index) -> None:
    lanes = engine._dispatcher.lanes
    assert isinstance(lanes, CoreLanes) and lanes.count == 2
    # One search goes to each lane: before its first it may not have come to say what it is.
    await asyncio.gather(*(engine.search(index, Query(vector=query)) for query in QUERIES[:2]))
    for thread in lanes._threads:
        assert os.sched_getscheduler(thread.native_id or 0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_engine_parking_does_not_change_answers(index: Index) -> None:
    scheduler = SchedulerSettings(park_after_ms=0.0, share=0.9)
    engine = SearchEngine(
        EngineSettings(lanes=1, places=2, slots=8, extends_max=1, scheduler=scheduler)
    )
    kinds = [
        SearchKind.DECODE,
        SearchKind.DECODE,
        SearchKind.LINK,
        SearchKind.PREFILL,
        SearchKind.PREFILL,
    ] * 8
    answers = await asyncio.gather(
        *(
            engine.search(index, Query(vector=query, kind=kind, top_m=128))
            for query, kind in zip(QUERIES, kinds, strict=False)
        )
    )  # fmt: skip
    rows, _ = index.search(QUERIES[: len(kinds)], Effort(top_m=128))
    assert np.array_equal(np.array([answer.rows for answer in answers]), rows)
    waits = engine.waits_ms(SearchKind.PREFILL, [0.5, 0.95], 1 << 62, window_ms=1 << 62)
    assert waits is not None
    assert_nothing_is_left(engine)
    await engine.close()


async def test_engine_leaks_nothing_over_many_searches() -> None:
    """10^5 searches through 8 slots, filtered ones too, while the index changes."""
    index = Index.build(gaussian(100, 8), metadata=[{"even": i % 2 == 0} for i in range(100)])
    engine = SearchEngine(EngineSettings(lanes=1, places=8, slots=8, scanned_rows_max=0))
    first = weakref.ref(index.view())
    queries = gaussian(24_800, 8, seed=3)
    for turn in range(4):
        effort = Effort(k=3, top_m=8, where=EqualFilter("even", True) if turn % 2 else None)
        await linked(engine, index, queries, effort)
        await asyncio.gather(*(engine.search(index, Query(vector=q)) for q in queries[:200]))
        index.upsert([turn], queries[turn : turn + 1], [{"even": True}])
    assert_nothing_is_left(engine)
    gc.collect()
    assert first() is None
    assert engine.load().running == 0
    await engine.close()


def test_engine_compiles_kernels_before_event_loop() -> None:
    """Kernels compiled at the first search delayed the worker of a new machine by 0.7 s."""
    program = (
        "from workers.vector.engine import engine, lane_loop\n"
        "from workers.vector.index import inputs\n"
        "from workers.vector.traversal import results\n"
        "engine.SearchEngine(engine.EngineSettings(lanes=1))\n"
        "kernels = [inputs._squares, results._count_space, results._read_all]\n"
        "kernels += [lane_loop.start, lane_loop.tell, lane_loop.collect]\n"
        "assert all(kernel.signatures for kernel in kernels), [k.signatures for k in kernels]\n"
        "import os; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_engine_compiles_long_filter_beside_event_loop(
    engine: SearchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of values is compared with every row."""
    where = OneOfFilter("n", range(4)) & ~(EqualFilter("n", 2) | RangeFilter("n", low=3))
    assert where.values_count == 6
    threads, allowed = [], CompiledFilters.allowed

    def record_thread(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return allowed(*arguments)

    monkeypatch.setattr(CompiledFilters, "allowed", record_thread)
    for longest, is_here in ((6 * 100, True), (6 * 100 - 1, False)):
        monkeypatch.setattr(view, "LONG", longest)
        index = Index.build(gaussian(100, 8), metadata=[{"n": i} for i in range(100)])
        for _ in range(2):  # the second time few rows are new
            for _ in range(2):
                answer = await engine.search(index, Query(vector=QUERIES[0][:8], where=where))
                assert sorted(map(int, answer.ids)) == [0, 1]
            index.upsert([200], gaussian(1, 8), [{"n": 50}])
        here = [thread is threading.current_thread() for thread in threads]
        assert here == [is_here, True]
        threads.clear()
