"""Entry points in cells: each is in one, the nearest, and searches are as good with them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.workers.search.data import gaussian, overlapping
from workers.search.graph import cells
from workers.search.index import audit
from workers.search.index.index import Index
from workers.search.index.inputs import prepared
from workers.search.index.query import Effort
from workers.search.index.view import IndexView
from workers.search.kernels.arrays import Array
from workers.search.kernels.metrics import Metric, Storage
from workers.search.walk.fields import PIVOTS_MAX, PROBES


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("count", [48, 300, 1_500])
def test_each_entry_point_is_in_the_cell_of_its_nearest_pivot(count: int, storage: Storage) -> None:
    vectors = prepared(gaussian(2_000, 20), 20, Metric.SQEUCLIDEAN, storage)
    entries = np.sort(np.random.default_rng(1).choice(2_000, count, replace=False))
    found = cells.of(vectors, entries, storage.number)
    assert found is not None
    assert np.sort(found.order).tolist() == entries.tolist()
    assert PROBES < len(found.pivots) <= PIVOTS_MAX
    assert found.bounds[0] == 0 and found.bounds[-1] == count
    plain = vectors.astype(np.float32)
    far = ((plain[found.order][:, None] - plain[found.pivots][None]) ** 2).sum(2)
    cell_of = np.repeat(np.arange(len(found.pivots)), np.diff(found.bounds))
    np.testing.assert_allclose(far[np.arange(count), cell_of], far.min(1), rtol=1e-5)


def test_a_few_entry_points_have_no_cells() -> None:
    vectors = prepared(gaussian(100, 8), 8, Metric.SQEUCLIDEAN)
    assert cells.of(vectors, np.arange(40), Storage.FLOAT32.number) is None


def test_equal_entry_points_share_the_first_cell() -> None:
    """So the nearest cell is never empty."""
    vectors = np.repeat(prepared(gaussian(1, 8), 8, Metric.SQEUCLIDEAN), 100, axis=0)
    found = cells.of(vectors, np.arange(100), Storage.FLOAT32.number)
    assert found is not None and found.bounds[1] == 100


def test_searches_measure_near_cells_alone_and_find_as_much() -> None:
    vectors, queries = overlapping(6_000, 100)
    index = Index.build(vectors)
    view = index.view()
    assert index.audit is not None and index.audit.in_cells and view.cells is not None
    flat = replace(view, in_cells=False, ways={})
    truth = index.searched(flat, queries, Effort(k=10, top_m=512))
    shares = [
        (index.searched(each, queries, Effort(k=10)) == truth).mean() for each in (view, flat)
    ]
    assert shares[0] >= shares[1] - 0.01


def test_cells_that_lose_rows_are_not_kept() -> None:
    index = Index.build(overlapping(3_000, 0)[0])
    view, random = replace(index.view(), in_cells=False, ways={}), np.random.default_rng(0)

    def loses(view: IndexView, queries: Array, effort: Effort) -> Array:
        found = index.searched(view, queries, effort)
        return np.full_like(found, -1) if view.in_cells else found

    kept, rounds, share = audit.in_cells(view, loses, random, None, 0.0)
    assert kept is view and rounds == audit.CELL_ROUNDS_MAX and share == 0.0
    taken, rounds, share = audit.in_cells(view, index.searched, random, None, 0.0)
    assert taken.in_cells and rounds <= 2 and share <= audit.ENOUGH
