"""What a search must get right to the last bit: small indexes, scans, filters, odd input."""

import numpy as np
import pytest

from schemas.errors import EmptyIndex, InvalidRequest, InvalidVector, WrongDimension
from tests.workers.vector.data import clustered_index, gaussian, nearest
from tests.workers.vector.traversal.reference import Reference
from workers.vector.filters.filters import EqualFilter, OneOfFilter, RangeFilter
from workers.vector.index import bulk, inputs, plans
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.metrics import Metric, Storage

SIZES = [1, 2, 3, 5, 31, 33, 127, 1_000]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("dim", [3, 17])
def test_small_index_search_is_exact(rows: int, dim: int) -> None:
    vectors, queries = gaussian(rows, dim), gaussian(9, dim, seed=1)
    hits, distances = Index.build(vectors).search(queries, Effort(k=10))
    hits_count = min(rows, 10)
    truth = nearest(vectors, queries, 10)
    assert hits[:, :hits_count].tolist() == truth.tolist()
    expected = ((vectors[truth] - queries[:, None]) ** 2).sum(2)
    np.testing.assert_allclose(distances[:, :hits_count], expected, rtol=1e-4)
    assert (hits[:, hits_count:] == -1).all()
    assert np.isinf(distances[:, hits_count:]).all()


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("metric", list(Metric))
def test_distances_match_metric_and_storage(metric: Metric, storage: Storage) -> None:
    vectors, queries = gaussian(200, 10), gaussian(5, 10, seed=1)
    index = Index.build(vectors, metric=metric, storage=storage)
    rows, distances = index.search(queries, Effort(k=200))
    products = queries @ vectors.T
    lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=1)
    expected = {
        Metric.SQEUCLIDEAN: ((vectors[None] - queries[:, None]) ** 2).sum(2),
        Metric.INNER_PRODUCT: -products,
        Metric.COSINE: 1 - products / lengths,
    }[metric]
    precision = 2e-2 if storage is Storage.FLOAT16 else 1e-4
    np.testing.assert_allclose(
        distances, np.take_along_axis(expected, rows, 1), rtol=precision, atol=precision
    )
    assert (np.diff(distances, axis=1) >= 0).all()


def test_search_orders_equal_distances_by_row() -> None:
    vectors = np.repeat(gaussian(4, 6), 300, axis=0)
    rows, _ = Index.build(vectors).search(vectors[[0, 600]], Effort(k=20, top_m=64))
    assert rows.tolist() == [list(range(20)), list(range(600, 620))]


def test_duplicates_do_not_shorten_walk() -> None:
    vectors = np.repeat(gaussian(300, 6), 5, axis=0)  # components of less than k rows
    index = Index.build(vectors, degree=4)
    rows, _ = index.search(vectors[:50], Effort(k=40, top_m=64))
    assert (rows >= 0).all()


@pytest.mark.parametrize("metric", list(Metric))
def test_search_handles_zero_vectors(metric: Metric) -> None:
    vectors = np.zeros((7, 5), np.float32)
    rows, distances = Index.build(vectors, metric=metric).search(vectors[:1], Effort(k=7))
    assert rows.tolist() == [list(range(7))]
    assert (distances == (1 if metric is Metric.COSINE else 0)).all()


def test_index_rejects_bad_input() -> None:
    index = Index.build(gaussian(5, 6))
    with pytest.raises(WrongDimension, match=r"expected vectors of 6 values, found shape \(5,\)"):
        index.search(np.zeros(5))
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(InvalidVector, match="NaN or infinity in vector 1"):
            index.search([[0.0] * 6, [bad] * 6])
        with pytest.raises(InvalidVector):
            index.upsert([9], [[bad] * 6])
    assert len(index) == 5
    with pytest.raises(InvalidVector, match="float32 instead"):
        Index.build([[1e6, 0.0]], storage=Storage.FLOAT16)
    for shape, message in ((np.zeros(4), "in rows"), (np.zeros((2, 0)), "dim >= 1")):
        with pytest.raises((InvalidRequest, WrongDimension), match=message):
            Index.build(shape)
    for words in ([["a", "b"]], [[1.0, 2.0], [3.0]]):
        with pytest.raises(InvalidVector, match="expected numbers in rows of one length"):
            Index.build(words)
    with pytest.raises(InvalidRequest, match="degree from 2 to 341, found 6 and 342"):
        Index(6, degree=342)
    for effort in (Effort(k=0), Effort(k=513), Effort(top_m=0), Effort(width=10_000)):
        with pytest.raises(InvalidRequest, match="expected (k|top_m|width) from 1 to"):
            index.search(np.zeros(6), effort)
    with pytest.raises(EmptyIndex):
        Index(6).search(np.zeros(6))


@pytest.mark.parametrize("metric", list(Metric))
def test_distances_are_always_finite(metric: Metric) -> None:
    """Otherwise a search would end with infinities, and with NaN where they cancel out."""
    largest = np.float32(9.2e18)  # its square is a quarter of the largest float32
    index = Index.build([[largest, 0.0], [-largest, 0.0], [1.0, 1.0]], metric=metric)
    assert np.isfinite(index.search([[-largest, 0.0], [1.0, 0.0]], Effort(k=3))[1]).all()
    for huge in ([3e38, -3e38], [[1.0, 1.0], [1e19, 0.0]]):
        if metric is Metric.COSINE:
            assert np.isfinite(index.search(huge, Effort(k=3))[1]).all()
            continue
        with pytest.raises(InvalidVector, match=r"found more in vector [01]; scale the vectors"):
            index.search(huge)
        with pytest.raises(InvalidVector, match="squares that sum to 8.5e[+]37 at most"):
            index.upsert([7, 8], np.resize(huge, (2, 2)))


@pytest.fixture(scope="module")
def index() -> Index:
    """Walked, with deleted rows and rows that are not linked yet."""
    index = clustered_index()
    index.delete(range(0, 3_000, 7))
    index.upsert(range(5_000, 5_200), gaussian(200, 20), [{"part": 3}] * 200)
    return index


@pytest.mark.parametrize(
    "effort",
    [
        Effort(k=1, top_m=16),
        Effort(k=10, top_m=48, width=3),
        Effort(k=10, top_m=64, width=2, patience=3),
        Effort(k=30, top_m=16),
        Effort(k=5, where=EqualFilter("part", 3)),
        Effort(k=5, where=~OneOfFilter("part", [1, 2, 3])),
        Effort(k=200, where=RangeFilter("part", 3, 3) & EqualFilter("kind", "odd")),
    ],
    ids=repr,
)
@pytest.mark.parametrize("scanned_max", [0, 10_000])
def test_kernel_equals_reference(index: Index, effort: Effort, scanned_max: int) -> None:
    view = index.view()
    queries = inputs.prepare(gaussian(6, 20, seed=2), 20, index.metric)
    hits = bulk.search_all(effort, queries, view, threads=1, scanned_rows_max=scanned_max)
    for i, query in enumerate(queries):
        admitted = plans.search_of(effort, query[None], view, scanned_rows_max=scanned_max)
        rows, distances = Reference(admitted).run()
        if rows[min(effort.k, admitted.plan.allowed) - 1] >= 0:
            assert rows.tolist() == hits.rows[i].tolist()
            assert distances.tobytes() == hits.distances[i].tobytes()
        assert (hits.rows[i] >= 0).sum() == min(effort.k, admitted.plan.allowed)


def test_rescan_after_failed_walk_is_exact(index: Index) -> None:
    """A walk that cannot return enough rows ends as a scan of all."""
    index = clustered_index(2_000)
    index.delete([i for i in range(2_000) if i % 100])
    queries = gaussian(4, 20, seed=3)
    rows, _ = index.search(queries, Effort(k=20, top_m=20))
    live = np.arange(2_000) % 100 == 0
    vectors = index.rows.vectors[:2_000, :20]
    assert rows.tolist() == nearest(vectors, queries, 20, live).tolist()
