"""An index that changes: upserts, deletes, linking, compaction, filters over metadata."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from schemas.errors import InvalidRequest, UnknownFilterField
from tests.workers.vector.data import gaussian, nearest, overlapping, recall
from workers.vector.filters.filters import EqualFilter, OneOfFilter, RangeFilter
from workers.vector.graph import build
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import unpack_bits

VECTORS, QUERIES = overlapping(6_000, 200, dim=24)


def found_ids(index: Index, effort: Effort) -> np.ndarray[Any, Any]:
    return np.array([index.ids_of(row) for row in index.search(QUERIES, effort)[0]])


def test_index_shows_upserts_and_deletes_at_once() -> None:
    index = Index.build(VECTORS[:3_000])
    index.upsert(range(3_000, 6_000), VECTORS[3_000:])
    everything = np.ones(6_000, bool)
    assert recall(found_ids(index, Effort()), nearest(VECTORS, QUERIES, 10, everything)) >= 0.95
    dead = np.random.default_rng(0).permutation(6_000)[:2_000]
    assert index.delete(dead.tolist()) == 2_000
    assert index.delete(dead.tolist()) == 0
    everything[dead] = False
    ids = found_ids(index, Effort())
    assert everything[ids].all()
    assert recall(ids, nearest(VECTORS, QUERIES, 10, everything)) >= 0.95


def test_upsert_replaces_row_of_same_id() -> None:
    index = Index.build(gaussian(2_000, 6), [f"{i}" for i in range(2_000)])
    far = np.full((1, 6), 50, np.float32)
    index.upsert(["7"], far)
    index.upsert(["7", "7"], np.repeat(far + 1, 2, axis=0))
    assert len(index) == 2_000
    rows, distances = index.search(far + 1, Effort(k=2))
    assert index.ids_of(rows[0])[0] == "7"
    assert "7" not in index.ids_of(rows[0])[1:]
    assert distances[0, 0] == 0


def test_linking_in_batches_matches_recall_of_build() -> None:
    index = Index.build(VECTORS[:4_000])
    index.upsert(range(4_000, 6_000), VECTORS[4_000:])
    steps = 0
    while index.link(batch=500):
        steps += 1
    assert steps == 3
    truth = nearest(VECTORS, QUERIES, 10)
    built = recall(found_ids(Index.build(VECTORS), Effort()), truth)
    assert recall(found_ids(index, Effort()), truth) >= built - 0.01
    assert (index.graph < 6_000).all()
    for row, edges in enumerate(index.graph[4_000:].tolist(), 4_000):
        neighbours = [edge for edge in edges if edge != row]
        assert len(set(neighbours)) == len(neighbours)


def test_linked_index_reaches_new_cluster() -> None:
    index = Index.build(VECTORS)
    far = 30 + gaussian(400, 24)
    index.upsert([f"far {i}" for i in range(400)], far)
    assert index.link() == 0
    roots = build.components(index.graph)
    assert set(roots) == set(roots[index.entries])
    rows, _ = index.search(far, Effort(k=1))
    assert [index.ids_of(row)[0] for row in rows] == [f"far {i}" for i in range(400)]


def test_compaction_drops_dead_rows_and_keeps_recall() -> None:
    metadata = [{"part": i % 4} for i in range(6_000)]
    index = Index.build(VECTORS, metadata=metadata)
    dead = np.random.default_rng(1).permutation(6_000)[:1_500]
    index.delete(dead.tolist())
    alive = np.ones(6_000, bool)
    alive[dead] = False
    before = recall(found_ids(index, Effort()), nearest(VECTORS, QUERIES, 10, alive))
    view = index.view()
    index.compact()
    assert len(index) == index.rows.count == 4_500
    assert index.dead_share == 0
    after = recall(found_ids(index, Effort()), nearest(VECTORS, QUERIES, 10, alive))
    assert after >= before - 0.02
    part = alive & (np.arange(6_000) % 4 == 1)
    ids = found_ids(index, Effort(where=EqualFilter("part", 1)))
    assert recall(ids, nearest(VECTORS, QUERIES, 10, part)) == 1
    assert view.count == 6_000  # who searches the old snapshot still can


def test_compaction_keeps_concurrent_changes() -> None:
    index = Index.build(gaussian(3_000, 8))
    index.delete(range(500))
    compacting = index.view().live_rows
    changed: list[bool] = []

    def interrupted() -> Any:
        if not changed:
            changed.append(True)
            index.upsert(["a", 600, "b"], 40 + gaussian(3, 8))
            index.delete([700, "b"])
        return compacting()

    object.__setattr__(index.view(), "live_rows", interrupted)
    index.compact()
    assert len(index) == 2_500
    assert set(index.rows.row_of) == {"a", *range(500, 3_000)} - {700}
    rows, _ = index.search(np.full(8, 40.0), Effort(k=2))
    assert set(index.ids_of(rows[0])) == {"a", 600}
    index.link()
    assert index.loose == 0


def test_graph_does_not_depend_on_threads() -> None:
    indexes = [Index.build(VECTORS, threads=threads, seed=3) for threads in (1, 3)]
    for index in indexes:
        index.upsert(range(9_000, 9_100), gaussian(100, 24))
        index.link()
    assert indexes[0].graph.tobytes() == indexes[1].graph.tobytes()
    assert indexes[0].entries.tobytes() == indexes[1].entries.tobytes()


def test_index_answers_searches_while_thread_changes_index() -> None:
    index = Index.build(VECTORS[:2_000])

    def change() -> None:
        for first in range(2_000, 4_000, 100):
            index.upsert(range(first, first + 100), VECTORS[first : first + 100])
            index.delete(range(first - 1_000, first - 990))
            index.link(batch=200)
        index.compact()

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            rows, distances = index.search(QUERIES[:20], Effort(k=10))
            assert (rows >= 0).all()
            assert (np.diff(distances, axis=1) >= 0).all()
        changing.result()
    assert len(index) == 4_000 - 200


def test_index_filters_rows_by_metadata() -> None:
    metadata: list[dict[str, Any]] = [
        {"n": i, "even": i % 2 == 0, "name": f"x{i % 5}"} for i in range(50)
    ]
    index = Index.build(gaussian(51, 3), metadata=[*metadata, {}])
    numbers = np.arange(51)
    has = numbers < 50
    cases = [
        (EqualFilter("n", 3), numbers == 3),
        (EqualFilter("name", "x1"), has & (numbers % 5 == 1)),
        (EqualFilter("name", "unknown"), np.zeros(51, bool)),
        (OneOfFilter("name", ["x1", "x2"]), has & np.isin(numbers % 5, [1, 2])),
        (EqualFilter("even", True) & RangeFilter("n", 10, 12), np.isin(numbers, [10, 12])),
        (RangeFilter("n", low=45), has & (numbers >= 45)),
        (RangeFilter("n", high=4) | EqualFilter("n", 9), (numbers <= 4) | (numbers == 9)),
        (~EqualFilter("even", True), ~(has & (numbers % 2 == 0))),
    ]  # fmt: skip
    for where, expected in cases:
        allowed = index.view().allowed(where)
        assert unpack_bits(allowed.bits, 51).tolist() == expected.tolist(), where
        rows, _ = index.search(np.zeros(3), Effort(k=51, where=where))
        assert sorted(rows[rows >= 0].tolist()) == np.flatnonzero(expected).tolist()
    for wrong in (
        EqualFilter("x", 1),
        EqualFilter("n", "text"),
        EqualFilter("name", 1),
        RangeFilter("name", 1, 2),
    ):
        with pytest.raises(UnknownFilterField, match="field|filter"):
            index.search(np.zeros(3), Effort(where=wrong))


def test_field_changes_type_after_last_row_of_former_type() -> None:
    """Otherwise the replacing document would be lost until a compaction."""
    index = Index(3)
    index.upsert([1, 2, 3], gaussian(3, 3), [{"v": "x"}, {"v": "y"}, {"n": 1}])
    before = index.view()
    with pytest.raises(InvalidRequest, match="as others have it"):
        index.upsert([1], gaussian(1, 3), [{"v": 5}])
    assert index.ids_of(
        np.flatnonzero(unpack_bits(index.view().allowed(EqualFilter("v", "x")).bits, 3))
    ) == [1]
    index.upsert([1, 2], gaussian(2, 3), [{"v": 5}, {}])
    assert index.ids_of(
        index.search(np.zeros(3), Effort(k=1, where=EqualFilter("v", 5)))[0][0]
    ) == [1]
    with pytest.raises(UnknownFilterField):
        index.search(np.zeros(3), Effort(where=EqualFilter("v", "x")))
    assert unpack_bits(before.allowed(EqualFilter("v", "x")).bits, 3).tolist() == [
        True,
        False,
        False,
    ]
    index.upsert([9], gaussian(1, 3), [{"v": ["z", "w"]}], deleted_ids=[1])
    assert index.ids_of(
        index.search(np.zeros(3), Effort(k=1, where=EqualFilter("v", "w")))[0][0]
    ) == [9]


def test_index_rejects_bad_documents_unchanged() -> None:
    index = Index.build(gaussian(5, 3), metadata=[{"n": 1}] * 5)
    vector = gaussian(1, 3)
    bad: list[tuple[list[Any], list[dict[str, Any]]]] = [
        ([True], [{}]),
        ([1.5], [{}]),
        ([2**63], [{}]),
        (["x" * 2_000], [{}]),
        (["\ud800"], [{}]),
        ([1, 2], [{}]),
        ([9], [{"n": "text"}]),
        ([9], [{"n": [[1]]}]),
        ([9], [{"n": [1, "text"]}]),
        ([9], [{"n": 2**60}]),
        ([9], [{f"f{i}": 1 for i in range(100)}]),
        ([9], [{}, {}]),
    ]
    for ids, metadata in bad:
        with pytest.raises(InvalidRequest, match="expected|holds"):
            index.upsert(ids, vector, metadata)
    assert len(index) == index.rows.count == 5
