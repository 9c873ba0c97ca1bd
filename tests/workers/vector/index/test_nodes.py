"""Where nodes are few and short, searches measure all of them, whatever else is in the index; but
those whose lists are so short that a walk takes less."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.workers.vector.data import gaussian, nearest, recall
from workers.vector.filters.filters import EqualFilter
from workers.vector.index import plans
from workers.vector.index import view as views
from workers.vector.index.index import Index
from workers.vector.index.query import Effort

QUERIES = gaussian(30, 20, seed=7)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(views, "NODES_MAX", 2_000)
    yield


def built(rows: int = 1_800) -> Index:
    metadata = [{"part": i % 3} for i in range(rows)]
    return Index.build(gaussian(rows, 20), metadata=metadata)


@pytest.mark.parametrize("k", [1, 10, 16, 17, 60])
def test_search_of_few_nodes_is_exact(k: int) -> None:
    index = built()
    way = plans.plan_search(Effort(k=k), index.view())
    assert way.exact and way.top_m == k
    rows = index.search(QUERIES, Effort(k=k))[0]
    assert rows.tolist() == nearest(gaussian(1_800, 20), QUERIES, k).tolist()


def test_short_list_is_walked_and_audit_tries_walks_only() -> None:
    index = built()
    view = index.view()
    assert plans.plan_search(Effort(k=10, top_m=32), view).exact
    short = plans.plan_search(Effort(k=10, top_m=10), view)
    assert not short.exact and short.top_m == 10
    rows = index.search(QUERIES, Effort(k=10, top_m=10))[0]
    assert recall(rows, nearest(gaussian(1_800, 20), QUERIES, 10)) > 0.8
    assert index.audit is not None
    shares = [share for _, share, _ in index.audit.efforts]
    assert 0.8 < shares[0] < 1


def test_node_scan_covers_filters_deletions_and_loose_rows() -> None:
    index = built()
    vectors = np.concatenate([gaussian(1_800, 20), gaussian(40, 20, seed=9)])
    index.upsert(range(1_800, 1_840), vectors[1_800:], [{"part": 1}] * 40)
    index.delete(range(0, 1_800, 4))
    live = np.setdiff1d(np.arange(1_840), np.arange(0, 1_800, 4))
    view = index.view()
    assert view.nodes is not None and view.linked == 1_800
    rows = index.search(QUERIES, Effort(k=10))[0]
    assert rows.tolist() == live[nearest(vectors[live], QUERIES, 10)].tolist()
    part = np.array([row for row in live if row >= 1_800 or row % 3 == 1])
    rows = index.search(QUERIES, Effort(k=10, where=EqualFilter("part", 1)))[0]
    assert rows.tolist() == part[nearest(vectors[part], QUERIES, 10)].tolist()


def test_node_scan_counts_duplicates_as_one_node() -> None:
    rows = np.repeat(gaussian(1_500, 20), 4, axis=0)
    index = Index.build(rows)
    view = index.view()
    assert view.nodes is not None and len(view.nodes) == 1_500
    hits, far = index.search(QUERIES, Effort(k=10))
    nearest_nodes = nearest(rows[::4], QUERIES, 3)
    for i in range(len(QUERIES)):
        equal = 4 * np.repeat(np.sort(nearest_nodes[i, :2]), 4) + np.tile(range(4), 2)
        assert sorted(hits[i, :8]) == equal.tolist()
        assert (np.diff(far[i]) >= 0).all()


def test_grown_index_is_walked_and_audited() -> None:
    index = built()
    assert index.audit is not None and index.audit.rows == 1_800
    index.upsert(range(1_800, 3_000), gaussian(1_200, 20, seed=8))
    while index.link():
        pass
    view = index.view()
    assert view.nodes is None and not plans.plan_search(Effort(), view).exact
    assert index.audit.rows == 3_000


def test_index_walks_long_vectors() -> None:
    view = Index.build(gaussian(1_200, 65), degree=8).view()
    assert view.nodes is None
