"""Codes leave no row out that a list would take: searches are the same with them and without."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schemas.errors import InvalidVector
from tests.workers.vector.data import gaussian, overlapping
from workers.vector.filters.filters import EqualFilter
from workers.vector.graph import knn
from workers.vector.index import bulk, inputs, plans, snapshot
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels import codes
from workers.vector.kernels.arrays import stored_bits, unpack_bits
from workers.vector.kernels.distances import SIMD_FLOATS, distance
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import Metric, Storage
from workers.vector.traversal import fields

Array = np.ndarray[Any, Any]


@kernel
def _limit(query: Array, coded: Array, worst: float, metric: int) -> Any:
    return codes.code_limit(np.float32(worst), address(coded), metric)


@kernel
def _encode(query: Array, ruler: Array, metric: int, out: Array, room: Array) -> None:
    codes.encode_query(
        address(query), address(ruler), query.shape[0], metric, address(out), address(room)
    )


@kernel
def _of_codes(table: Array, coded: Array, metric: int, out: Array) -> None:
    for i in range(len(table)):
        at = address(table) + i * table.strides[0]
        out[i] = codes.code_distance(at, address(coded), table.shape[1], metric)


@kernel
def _of_vectors(vectors: Array, query: Array, metric: int, stored: int, out: Array) -> None:
    for i in range(len(vectors)):
        at = address(vectors) + i * vectors.strides[0]
        out[i] = distance(at, address(query), vectors.shape[1], metric, stored)


def _scenes() -> dict[str, tuple[Array, Array]]:
    """Vectors and queries that are hard to code."""
    random = np.random.default_rng(3)
    usual = gaussian(400, 140, seed=1)
    uneven = usual * np.geomspace(1e-3, 1e3, 140, dtype=np.float32)
    sparse = (random.random((400, 140)) < 0.05).astype(np.float32)
    same = np.repeat(gaussian(4, 140, seed=2), 100, 0)
    tails = random.standard_t(1.5, (400, 140)).astype(np.float32)
    line = np.zeros((400, 140), np.float32)
    line[:, 0] = 1 + random.random(400)  # errors add up, as they do not in many directions
    return {
        "usual": (usual, gaussian(20, 140, seed=5)),
        "moved": (usual + np.float32(1e4), gaussian(20, 140, seed=5) + np.float32(1e4)),
        "far away": (usual, 50 * gaussian(20, 140, seed=5)),
        "uneven": (uneven, uneven[:20] * np.float32(1.01)),
        "sparse": (sparse, sparse[::20]),
        "equal rows": (same, same[::20]),
        "zeros": (np.zeros((50, 140), np.float32), gaussian(20, 140, seed=5)),
        "heavy tails": (tails, tails[::20]),
        "one is huge": (np.concatenate([usual, 1e13 * usual[:1]]), 3 * usual[:20]),
        "one is far": (np.concatenate([usual, 1e3 * usual[:1]]), usual[:20]),
        "on a line": (line, np.float32(1.001) * line[::20]),
        "tiny": (1e-20 * usual, 1e-20 * usual[:20]),
        "huge queries": (usual, 5e17 * usual[:20]),  # larger ones are refused
        "zeros, huge queries": (np.zeros((50, 140), np.float32), 5e17 * usual[:20]),
        "huge": (1e14 * usual, 1e14 * usual[:20]),
        "huge and tiny": (usual * np.geomspace(1e-30, 1e14, 140, dtype=np.float32), usual[:20]),
    }


NOT_HALF = ("huge", "huge and tiny", "one is huge")  # float16 does not hold them


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("scene", _scenes())
def test_code_limit_admits_all_nearer_rows(scene: str, metric: Metric, storage: Storage) -> None:
    """Whatever the worst of a list is, every row that is nearer is within its limit."""
    points, query_points = _scenes()[scene]
    if storage is Storage.FLOAT16 and metric is not Metric.COSINE and scene in NOT_HALF:
        with pytest.raises(InvalidVector, match="store float32 instead"):
            inputs.prepare(points, 140, metric, storage)
        return
    vectors = inputs.prepare(points, 140, metric, storage)
    row_codes = codes.encode_rows(vectors, metric.number)
    assert row_codes is not None
    far, coded_far = np.empty(len(points), np.float32), np.empty(len(points), np.int64)
    coded, room = np.zeros(codes.CODED_QUERY_BYTES, np.uint8), np.empty(144, np.float32)
    passing = np.zeros(len(points), bool)
    if row_codes.outliers is not None:
        passing = unpack_bits(row_codes.outliers, len(points))
        assert passing.mean() <= 0.02 and metric is not Metric.SQEUCLIDEAN
    for query in inputs.prepare(query_points, 140, metric):
        _encode(query, row_codes.quantizer, metric.number, coded, room)
        _of_codes(row_codes.codes, coded, metric.number, coded_far)
        _of_vectors(stored_bits(vectors), query, metric.number, storage.number, far)
        for worst in np.sort(far)[:: len(far) // 20]:
            limit = _limit(query, coded, worst, metric.number)
            assert ((coded_far <= limit) | passing)[far <= worst].all()


@pytest.mark.parametrize("metric", Metric)
def test_outlier_row_does_not_coarsen_codes(metric: Metric) -> None:
    """One row of a hundred times the length made all steps coarse: codes left nothing out."""
    usual = gaussian(3_000, 64, seed=1)
    wild = usual.copy()
    wild[1_500] *= 100
    errors = []
    for points in (usual, wild):
        row_codes = codes.encode_rows(inputs.prepare(points, 64, metric), metric.number)
        assert row_codes is not None
        errors.append(row_codes.error)
        is_wild = points is wild and metric is Metric.INNER_PRODUCT
        is_outlier = (
            np.zeros(1)
            if row_codes.outliers is None
            else unpack_bits(row_codes.outliers, len(points))
        )
        assert np.flatnonzero(is_outlier).tolist() == ([1_500] if is_wild else [])
    assert errors[1] < 1.3 * errors[0]


def test_growing_codes_keep_outliers_of_each_version() -> None:
    """Versions share the words of their bit sets; an unused version leaves no trace."""
    vectors = inputs.prepare(gaussian(2_200, 64, seed=1), 64, Metric.INNER_PRODUCT)
    vectors[[1_500, 2_031, 2_035, 2_190]] *= 100
    kernel = Metric.INNER_PRODUCT.number
    row_codes, versions = codes.encode_rows(vectors[:2_000], kernel), []
    for count in (2_030, 2_033, 2_080, 2_200):
        codes.extend(row_codes, vectors[: min(2_200, count + 6)], kernel)
        row_codes = codes.extend(row_codes, vectors[:count], kernel)
        assert row_codes is not None and row_codes.outliers is not None
        versions.append((row_codes.outliers, count))
    for bits, count in versions:
        expected = [row for row in (1_500, 2_031, 2_035, 2_190) if row < count]
        assert set(expected) <= set(np.flatnonzero(unpack_bits(bits, count)).tolist())
        assert unpack_bits(bits, count).mean() < 0.1


def test_codes_exclude_most_rows() -> None:
    vectors, queries = overlapping(2_000, 1, dim=128)
    row_codes = codes.encode_rows(inputs.prepare(vectors, 128, Metric.SQEUCLIDEAN), 0)
    assert row_codes is not None
    coded, room = np.zeros(codes.CODED_QUERY_BYTES, np.uint8), np.empty(128, np.float32)
    coded_far, far = np.empty(2_000, np.int64), ((vectors - queries) ** 2).sum(1)
    _encode(queries[0], row_codes.quantizer, 0, coded, room)
    _of_codes(row_codes.codes, coded, 0, coded_far)
    limit = _limit(queries[0], coded, np.sort(far)[100], 0)
    assert 101 <= (coded_far <= limit).sum() < 300


def _hit_bytes(view: IndexView, queries: Array, effort: Effort) -> list[bytes]:
    hits = bulk.search_all(effort, queries, view, threads=1)
    return [hits.rows.tobytes(), hits.distances.tobytes()]


def _without(view: IndexView) -> IndexView:
    plain = replace(view, codes=None, plans={})
    assert not plain.template[fields.CODES]
    return plain


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("metric", Metric)
def test_search_is_same_without_codes(metric: Metric, storage: Storage) -> None:
    """Views are linked, with loose rows, with deleted ones, linked again and compacted."""
    vectors, queries = overlapping(2_600, 40, dim=128)
    metadata = [{"part": i % 4} for i in range(len(vectors))]
    index = Index.build(vectors[:2_000], metadata=metadata[:2_000], metric=metric, storage=storage)
    views = [index.view()]
    index.upsert(range(2_000, 2_600), 1.5 * vectors[2_000:], metadata[2_000:])
    views.append(index.view())
    index.delete(range(0, 1_000, 3))
    views.append(index.view())
    index.link()
    views.append(index.view())
    index.compact()
    views.append(index.view())
    prepared = inputs.prepare(queries, 128, metric)
    for view in views:
        assert view.codes is not None
        assert len(view.codes.codes) == view.linked
        for effort in (
            Effort(k=10, top_m=32),
            Effort(k=5, top_m=64, width=3, patience=2),
            Effort(k=20, top_m=24, where=~EqualFilter("part", 0)),
        ):
            assert _hit_bytes(view, prepared, effort) == _hit_bytes(
                _without(view), prepared, effort
            )


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("scene", _scenes())
def test_search_of_hard_vectors_is_same_without_codes(scene: str, metric: Metric) -> None:
    points, query_points = _scenes()[scene]
    view = Index.build(points, metric=metric, degree=8).view()
    assert view.codes is not None
    prepared = inputs.prepare(query_points, 140, metric)
    for effort in (Effort(k=10, top_m=12), Effort(k=3, top_m=8, width=2, patience=2)):
        assert _hit_bytes(view, prepared, effort) == _hit_bytes(_without(view), prepared, effort)


def test_warm_search_is_same_without_codes() -> None:
    vectors, queries = overlapping(2_000, 2, dim=96)
    view = Index.build(vectors).view()
    prepared = inputs.prepare(queries, 96, Metric.SQEUCLIDEAN)
    results = []
    for view_or_plain in (view, _without(view)):
        search = plans.search_of(
            Effort(k=10, top_m=32), prepared[:1], view_or_plain, seeds=np.arange(0, 2_000, 50)
        )
        rows, far = np.empty((1, 10), np.int64), np.empty((1, 10), np.float32)
        bulk.run_feed(search, bulk.feed(prepared[1:], rows, far, 0, 1), 1)
        results.append((rows.tobytes(), far.tobytes()))
    assert results[0] == results[1]


def test_codes_are_rebuilt_for_rows_beyond_quantizer() -> None:
    vectors = gaussian(600, 128, seed=1)
    row_codes = codes.encode_rows(vectors[:300], 0)
    assert row_codes is not None
    longer_codes = codes.extend(row_codes, np.concatenate([vectors[:300], 0.5 * vectors[:300]]), 0)
    assert longer_codes is not None
    assert (longer_codes.codes[:300] == row_codes.codes).all()
    wide = vectors.copy()
    wide[300:] *= 10
    wide_codes = codes.extend(row_codes, wide, 0)
    assert wide_codes is not None
    assert wide_codes.error < 20 * row_codes.error
    wide[300:] *= 2e13  # lengths beyond 1e15, values not: no bound may be cut short
    far = codes.extend(row_codes, wide, Metric.INNER_PRODUCT.number)
    assert far is not None
    size = float(np.linalg.norm(wide.astype(np.float64), axis=1).max())
    assert float(far.quantizer[len(far.quantizer) - SIMD_FLOATS + 2]) >= 0.99 * size
    wide[0, 0] = 1e20
    assert codes.encode_rows(wide, 0) is None
    assert codes.extend(row_codes, wide[:300], 0) is not None


@pytest.mark.parametrize(
    ("dim", "has_codes"), [(16, False), (64, True), (4_096, True), (4_097, False)]
)
def test_codes_exist_for_supported_dimensions_only(dim: int, has_codes: bool) -> None:
    vectors = inputs.prepare(gaussian(3, dim, seed=1), dim, Metric.SQEUCLIDEAN)
    assert (codes.encode_rows(vectors, 0) is not None) is has_codes


def test_snapshot_stores_codes(tmp_path: Any) -> None:
    index = Index.build(gaussian(1_500, 80, seed=1))
    snapshot.save(index, tmp_path / "index")
    loaded, row_codes = snapshot.load(tmp_path / "index").view().codes, index.view().codes
    assert loaded is not None
    assert row_codes is not None
    assert (loaded.codes == row_codes.codes).all()
    assert (loaded.quantizer == row_codes.quantizer).all()


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("metric", Metric)
def test_neighbours_are_same_without_codes(
    metric: Metric, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "EXACT_ROWS_MAX", 0)
    points, _ = overlapping(3_000, 0, dim=136)
    vectors = inputs.prepare(points, 136, metric, storage)
    assert codes.encode_rows(vectors, metric.number) is not None
    kernels = (metric.number, storage.number)
    lists = knn.neighbours(vectors, 40, *kernels, threads=3)
    monkeypatch.setattr(codes, "encode_rows", lambda *_, **__: None)
    assert (knn.neighbours(vectors, 40, *kernels, threads=1) == lists).all()
