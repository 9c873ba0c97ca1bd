"""The CUDA kernels find what the CPU's find, to the last bit, in any company.

They run as they are, on a real device where there is one and always in an emulator, which also runs
a block's threads in many orders.
"""

from typing import Any

import numpy as np
import pytest

from tests.workers.search.cuda.emulator import EmulatedDevice
from tests.workers.search.data import clustered_index, gaussian, nearest, overlapping
from tests.workers.search.walk.reference import Reference, hits_of
from workers.search.cuda import builder, feeds
from workers.search.cuda.batch import Batch, BatchSettings
from workers.search.cuda.device import Device
from workers.search.cuda.rings import DEPTH
from workers.search.graph.build import own_graph
from workers.search.graph.knn import neighbours
from workers.search.index import bulk, inputs, ways
from workers.search.index.filters import Equal, OneOf, Range
from workers.search.index.index import Index
from workers.search.index.query import Effort
from workers.search.index.view import IndexView
from workers.search.kernels.metrics import Metric, Storage
from workers.search.walk import fields

Array = np.ndarray[Any, Any]

SIZES = BatchSettings(
    slots=12, sizes=(2, 8), steps=(1, 4), top_m_max=96, k_max=200, dim_max=256, tasks_max=256,
    seed_rows=64, merge_max=64, threads=32,
)  # fmt: skip
EFFORTS = [
    Effort(k=1, top_m=16),
    Effort(k=10, top_m=48, width=3),
    Effort(k=10, top_m=64, width=2, patience=3),
    Effort(k=30, top_m=16),
    Effort(k=5, where=Equal("part", 3)),
    Effort(k=5, top_m=24, where=~OneOf("part", [1, 2, 3])),
    Effort(k=90, where=Range("part", 3, 3) & Equal("kind", "odd")),
]


@pytest.fixture(scope="module")
def view() -> IndexView:
    """Walked, with deleted rows and rows that are not linked yet."""
    index = clustered_index()
    index.delete(range(0, 3_000, 7))
    index.upsert(range(5_000, 5_200), gaussian(200, 20), [{"part": 3}] * 200)
    return index.view()


def searches(view: IndexView, effort: Effort, count: int = 6, **how: Any) -> list[Any]:
    queries = inputs.prepared(gaussian(count, view.dim, seed=2), view.dim, view.metric)
    return [
        ways.search_of(effort, np.ascontiguousarray(query[None]), view, **how) for query in queries
    ]


def admit(batch: Batch, slot: int, search: ways.Search) -> None:
    warm = np.empty(0, np.int64) if search.warm is None else search.warm
    batch.assign(slot, batch.copies.row(search.row, search), search.query[0], warm)


def left(batch: Batch, slot: int, search: ways.Search) -> tuple[bytes, bytes, list[int]]:
    """Rows, distances and counts that an ended slot left."""
    lists = batch.found if search.row[fields.SCREENED] else batch.top
    rows, distances = hits_of(lists[slot, : search.k].copy())
    return rows.tobytes(), distances.tobytes(), batch.counts[slot].tolist()


def run(batch: Batch, wanted: list[Any], extends: int = 4) -> list[tuple[bytes, bytes, list[int]]]:
    """What searches leave that are all begun at once."""
    for slot, search in enumerate(wanted):
        admit(batch, slot, search)
    out, active = {}, list(range(len(wanted)))
    while active:
        batch.launch(active[: batch.places], extends)
        for slot in batch.collect():
            out[slot] = left(batch, slot, wanted[slot])
            active.remove(slot)
    return [out[slot] for slot in range(len(wanted))]


@pytest.mark.parametrize("effort", EFFORTS, ids=repr)
@pytest.mark.parametrize("scanned_max", [0, 10_000])
def test_searches_equal_the_cpus_and_the_reference(
    device: Device, view: IndexView, effort: Effort, scanned_max: int
) -> None:
    wanted = searches(view, effort, scanned_rows_max=scanned_max)
    for search, (rows, distances, counts) in zip(wanted, run(Batch(device, SIZES), wanted),
                                                 strict=True):  # fmt: skip
        expected = Reference(search).run()
        assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
        if search.exact or expected[0][min(effort.k, search.allowed) - 1] >= 0:
            same = bulk.search_all(effort, search.query, view, scanned_rows_max=scanned_max)
            assert rows == same.rows.tobytes()
            assert counts[0] == same.extends


def test_walks_in_vain_are_told_alike(device: Device) -> None:
    """What is near the first query is deleted, so that its hits are a matter of chance: they are
    dropped, and the rest is scanned (issue 10, 31)."""
    index = clustered_index()
    queries = inputs.prepared(gaussian(6, 20, seed=2), 20, Metric.SQEUCLIDEAN)
    index.delete(nearest(index.view().vectors[:, :20], queries[:1, :20], 500)[0].tolist())
    view, effort = index.view(), Effort(k=10, top_m=32)
    wanted = searches(view, effort, scanned_rows_max=0)
    found = run(Batch(device, SIZES), wanted)
    for search, (rows, distances, _) in zip(wanted, found, strict=True):
        expected = Reference(search).run()
        assert (rows, distances) == (expected[0].tobytes(), expected[1].tobytes())
    assert (np.frombuffer(found[0][0], np.int64) == -1).all()
    cpu = bulk.search_all(effort, queries, view, scanned_rows_max=0)
    gpu = feeds.search_all(Batch(device, SIZES), effort, queries, view, scanned_rows_max=0)
    exact = bulk.search_all(effort, queries[:1], view, scanned_rows_max=view.count)
    assert cpu.rows.tobytes() == gpu.rows.tobytes()
    assert cpu.rows[0].tobytes() == exact.rows[0].tobytes()


@pytest.mark.parametrize("order", [1, 2, 17, 12_345, 99_999])
def test_no_order_of_threads_or_blocks_changes_anything(order: int, view: IndexView) -> None:
    for effort in (EFFORTS[1], EFFORTS[5]):
        wanted = searches(view, effort)
        plain, other = EmulatedDevice(), EmulatedDevice(order)
        sizes = BatchSettings(**{**vars_of(SIZES), "threads": 64})
        assert run(Batch(other, sizes), wanted) == run(Batch(plain, SIZES), wanted)
        other.check()


def vars_of(sizes: BatchSettings) -> dict[str, Any]:
    return {name: getattr(sizes, name) for name in sizes.__dataclass_fields__}


@pytest.mark.parametrize("team", [4, 8, 16])
@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("metric", list(Metric))
def test_distances_are_the_cpus_whatever_the_team(
    device: Device, metric: Metric, storage: Storage, team: int
) -> None:
    sizes = BatchSettings(**{**vars_of(SIZES), "team": team})
    for dim in (3, 64, 100, 200):
        index = Index.build(gaussian(90, dim), metric=metric, storage=storage)
        view = index.view()
        queries = inputs.prepared(gaussian(4, dim, seed=1), dim, metric)
        cpu = bulk.search_all(Effort(k=90), queries, view)
        gpu = feeds.search_all(Batch(device, sizes), Effort(k=90), queries, view)
        assert cpu.rows.tobytes() == gpu.rows.tobytes()
        assert cpu.distances.tobytes() == gpu.distances.tobytes()


@pytest.mark.parametrize("metric", list(Metric))
def test_codes_with_which_cores_leave_rows_out_change_nothing(
    device: Device, metric: Metric
) -> None:
    view = Index.build(overlapping(1_500, 0, 96)[0], metric=metric, degree=16).view()
    assert view.codes is not None
    queries = inputs.prepared(gaussian(8, 96, seed=4), 96, metric)
    effort = Effort(k=10, top_m=40, width=2)
    cpu = bulk.search_all(effort, queries, view)
    gpu = feeds.search_all(Batch(device, SIZES), effort, queries, view)
    assert cpu.rows.tobytes() == gpu.rows.tobytes()
    assert cpu.distances.tobytes() == gpu.distances.tobytes()
    assert cpu.extends == gpu.extends


def test_ties_are_ordered_by_row(device: Device) -> None:
    vectors = np.repeat(np.round(gaussian(4, 6) * 4), 300, axis=0)
    view = Index.build(vectors).view()
    queries = inputs.prepared(vectors[[0, 600]], 6, view.metric)
    found = feeds.search_all(Batch(device, SIZES), Effort(k=20, top_m=64), queries, view)
    assert found.rows.tolist() == [list(range(20)), list(range(600, 620))]
    truth = ((vectors[found.rows] - vectors[[0, 600]][:, None]) ** 2).sum(2)
    assert found.distances.tobytes() == truth.astype(np.float32).tobytes()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 31, 33, 127])
def test_small_indexes_are_searched_exactly(device: Device, rows: int) -> None:
    vectors, queries = gaussian(rows, 17), gaussian(5, 17, seed=1)
    view = Index.build(vectors).view()
    prepared = inputs.prepared(queries, 17, view.metric)
    found = feeds.search_all(Batch(device, SIZES), Effort(k=10), prepared, view)
    kept = min(rows, 10)
    assert found.rows[:, :kept].tolist() == nearest(vectors, queries, 10).tolist()
    assert (found.rows[:, kept:] == -1).all()


def test_a_walk_that_fills_its_table_loses_nothing(device: Device) -> None:
    """Beyond half of the visited table rows are not kept: they come again and are dropped."""
    index = Index.build(gaussian(3_000, 24), degree=120)
    queries = inputs.prepared(gaussian(3, 24, seed=3), 24, index.metric)
    effort = Effort(k=5, top_m=21, width=2)
    found = feeds.search_all(Batch(device, SIZES), effort, queries, index.view())
    assert found.computed / len(queries) > 1_024
    cpu = bulk.search_all(effort, queries, index.view())
    assert found.rows.tobytes() == cpu.rows.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_a_result_does_not_depend_on_what_runs_beside_it(
    device: Device, view: IndexView, seed: int
) -> None:
    """Random arrivals, parks, resumes, gives-up and turns under way."""
    random = np.random.default_rng(seed)
    batch, free = Batch(device, SIZES), list(range(SIZES.slots))
    held: dict[int, Any] = {}
    wanted = [
        (number, search)
        for number, search in enumerate(
            search
            for effort in EFFORTS
            for search in searches(view, effort, 4, scanned_rows_max=0, seeds=(3, 8, 40))
        )
    ]
    alone = {n: run(Batch(device, SIZES), [search])[0] for n, search in wanted}
    while wanted or held:
        while wanted and free and random.random() < 0.7:
            number, search = wanted.pop(int(random.integers(len(wanted))))
            slot = free.pop()
            admit(batch, slot, search)
            held[slot] = (number, search)
        if held and random.random() < 0.05:
            slot = int(random.choice(list(held)))
            batch.give_up(slot)
            wanted.append(held.pop(slot))
            while batch.under_way:  # what it points to would go now
                finish(batch, held, free, alone)
            free.append(slot)
        active = [slot for slot in held if random.random() < 0.8][: batch.places]
        batch.launch(active, int(random.integers(1, 8)))
        if batch.under_way == DEPTH or random.random() < 0.3:
            finish(batch, held, free, alone)
    while batch.under_way:
        finish(batch, held, free, alone)
    assert sorted(free) == list(range(SIZES.slots))


def finish(batch: Batch, held: dict[int, Any], free: list[int], alone: dict[int, Any]) -> None:
    for slot in batch.collect():
        number, search = held.pop(slot)
        assert left(batch, slot, search) == alone[number]
        free.append(slot)


def test_bulk_searches_equal_the_cpus(device: Device, view: IndexView) -> None:
    queries = inputs.prepared(gaussian(40, 20, seed=5), 20, view.metric)
    for effort in (Effort(k=7, top_m=32), Effort(k=40, top_m=20, where=~Equal("part", 3))):
        cpu = bulk.search_all(effort, queries, view, threads=1)
        gpu = feeds.search_all(Batch(device, SIZES), effort, queries, view)
        assert gpu.rows.tobytes() == cpu.rows.tobytes()
        assert gpu.distances.tobytes() == cpu.distances.tobytes()


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dim", [20, 130])
def test_neighbour_lists_equal_the_cpus(
    device: Device, monkeypatch: pytest.MonkeyPatch, storage: Storage, exact: bool, dim: int
) -> None:
    """Those of 130 values have codes there."""
    monkeypatch.setattr("workers.search.graph.knn.EXACT_ROWS_MAX", 1_000 if exact else 0)
    monkeypatch.setattr(builder, "THREADS", 32)
    kind = (Metric.SQEUCLIDEAN.number, storage.number)
    vectors = inputs.prepared(gaussian(150, dim), dim, Metric.SQEUCLIDEAN, storage)
    cpu = neighbours(vectors, 24, *kind, seed=3, threads=1)
    gpu = builder.neighbours(device, vectors, 24, *kind, seed=3, exact_rows_max=1_000 * exact)
    assert cpu.tobytes() == gpu.tobytes()


def test_an_index_that_is_built_on_a_device_is_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "THREADS", 32)
    vectors = gaussian(120, 10)
    one = Index.build(vectors, degree=8, graph_of=own_graph)
    two = Index.build(vectors, degree=8, graph_of=builder.graph_on(device))
    assert one.graph.tobytes() == two.graph.tobytes()


def test_a_device_holds_copies_of_what_lives_only(device: Device) -> None:
    index, batch = clustered_index(1_200), Batch(device, SIZES)
    first = searches(index.view(), EFFORTS[1], 1, scanned_rows_max=0)
    run(batch, first)
    known = len(batch.copies)
    index.upsert([9_000], gaussian(1, 20))
    index.upsert([9_001], gaussian(1, 20, seed=8))  # beside the first: vectors have grown in place
    second = searches(index.view(), Effort(k=3, top_m=32), 1, scanned_rows_max=0)
    assert run(batch, second)[0][0] == Reference(second[0]).run()[0].tobytes()
    del first, second, index
    assert len(batch.copies) < known


def test_sizes_are_checked() -> None:
    for wrong, message in (
        ({"merge_max": 100}, "cuda.merge_max: expected a power of two"),
        ({"sizes": (8, 2)}, "cuda.sizes: expected ascending numbers"),
        ({"team": 5}, "expected a team of 4, 8 or 16"),
        ({"sizes": (64,)}, "expected sizes up to slots"),
    ):
        with pytest.raises(Exception, match=message):
            BatchSettings(**{**vars_of(SIZES), **wrong})
