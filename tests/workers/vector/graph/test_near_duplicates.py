"""Rows that rounding has moved apart are copies by inner product and cosine."""

import numpy as np
import pytest

from tests.workers.vector.data import gaussian
from workers.vector.graph import duplicates, near_duplicates
from workers.vector.index.index import Index
from workers.vector.index.inputs import prepare
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import INNER_PRODUCT, SQUARED_L2, Metric, Storage

EACH = 12


def scaled(groups: int, dim: int = 40) -> Array:
    """Each direction twelve times, in other lengths: rows i, i + groups, ..."""
    random = np.random.default_rng(4)
    rows = np.tile(gaussian(groups, dim), (EACH, 1))
    scaled_rows: Array = (rows * np.exp(random.normal(0, 0.4, (len(rows), 1)))).astype(np.float32)
    return scaled_rows


def test_scaled_directions_are_duplicates_of_first() -> None:
    unit = prepare(scaled(300), 40, Metric.COSINE)
    assert len(np.unique(unit, axis=0)) > 2 * 300
    node_of = duplicates.first_equal(unit, INNER_PRODUCT)
    assert (node_of == np.arange(len(unit)) % 300).all()
    assert len(np.unique(duplicates.first_equal(unit, SQUARED_L2))) == len(np.unique(unit, axis=0))
    assert not near_duplicates.are_merged(unit.astype(np.float16), INNER_PRODUCT)


@pytest.mark.parametrize("norm", [1e-12, 1.0, 1e12])
def test_rows_apart_beyond_rounding_are_not_duplicates(norm: float) -> None:
    near = np.tile(gaussian(1, 32, seed=5), (40, 1))
    near /= np.linalg.norm(near[0])
    near[:, 0] += np.arange(40) * 1e-5
    assert (
        duplicates.first_equal((near * norm).astype(np.float32), INNER_PRODUCT) == np.arange(40)
    ).all()


def test_duplicate_stays_near_its_node_in_long_chain() -> None:
    """Each row equals the next, but the first does not equal the last."""
    random = np.random.default_rng(6)
    rows = np.tile(prepare(gaussian(1, 32), 32, Metric.COSINE), (400, 1))
    rows[:, 1] += random.permutation(400) * np.float32(1e-7)
    node_of = duplicates.first_equal(rows, INNER_PRODUCT)
    assert 20 < len(np.unique(node_of)) < 400
    assert (node_of[node_of] == node_of).all() and (node_of <= np.arange(400)).all()
    far = np.linalg.norm(rows - rows[node_of], axis=1)
    assert far.max() <= 2 * near_duplicates._ROUNDED * 1.01


def test_first_equal_treats_zeros_as_equal() -> None:
    rows = np.zeros((5, 16), np.float32)
    rows[2, 0] = 1e-30
    assert duplicates.first_equal(rows, INNER_PRODUCT).tolist() == [0, 0, 2, 0, 0]


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.INNER_PRODUCT])
def test_search_finds_near_duplicates_like_scan_after_growth(metric: Metric) -> None:
    unit = prepare(scaled(600), 40, Metric.COSINE)[:, :40]
    vectors = unit if metric is Metric.INNER_PRODUCT else scaled(600)
    index = Index.build(vectors[:6_000], metric=metric, degree=16)
    index.upsert(range(6_000, len(vectors)), vectors[6_000:])
    while index.link():
        pass
    view = index.view()
    assert duplicates.node_count(view.chain, view.linked) == 600
    queries = gaussian(50, 40, seed=8)
    hits, far = index.search(queries, Effort(k=20, top_m=64))
    exact = -(prepare(queries, 40, metric)[:, :40].astype(np.float64) @ unit.T)
    exact += metric is Metric.COSINE
    assert np.abs(np.take_along_axis(exact, hits, 1) - far).max() < 5e-6 * np.abs(exact).max()
    best = np.sort(exact, axis=1)[:, 19:20]
    assert (np.take_along_axis(exact, hits, 1) <= best + 5e-6 * np.abs(best)).mean() > 0.97
    assert index.audit is not None and index.audit.missed_share <= 0.002
    assert index.storage is Storage.FLOAT32


def test_search_finds_duplicate_of_deleted_node() -> None:
    index = Index.build(scaled(600), metric=Metric.COSINE, degree=16)
    index.delete(range(600))
    index.compact()
    view = index.view()
    assert len(index) == 11 * 600 and duplicates.node_count(view.chain, view.linked) == 600
    hits, far = index.search(gaussian(600, 40), Effort(k=11, top_m=32))
    rows = np.array(index.ids_of(hits.ravel())).reshape(hits.shape)
    assert (np.sort(rows % 600, axis=1) == np.arange(600)[:, None]).mean() > 0.99
    assert np.abs(far).max() < 1e-5
