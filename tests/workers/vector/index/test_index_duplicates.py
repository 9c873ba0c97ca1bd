"""Rows with equal vectors share a node of the graph; all else is about rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.vector.data import gaussian
from tests.workers.vector.traversal.reference import Reference
from workers.vector.filters.filters import EqualFilter, Filter
from workers.vector.graph import duplicates
from workers.vector.index import bulk, inputs, plans, snapshot
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import unpack_bits
from workers.vector.kernels.metrics import Metric

DISTINCT, DIM = gaussian(2_000, 20), 20
QUERIES = DISTINCT[:60] + 0.05 * gaussian(60, DIM, seed=1)
OF = np.random.default_rng(0).integers(0, len(DISTINCT), 7_000)
OF[:600] = np.arange(600) % 3  # 200 copies of each of three


def metadata(rows: int) -> list[dict[str, Any]]:
    return [{"part": i % 5} for i in range(rows)]


def index_with_duplicates() -> Index:
    """Built with copies; some came later, of old rows and of each other; some were deleted."""
    index = Index.build(DISTINCT[OF[:4_000]], metadata=metadata(4_000), degree=16, threads=1)
    index.upsert(range(4_000, 7_000), DISTINCT[OF[4_000:]], metadata(3_000))
    while index.loose > 300:
        index.link(batch=900)
    index.delete(range(0, 7_000, 7))
    return index


@pytest.fixture(scope="module")
def index() -> Index:
    return index_with_duplicates()


def is_exact(index: Index, effort: Effort, queries: Any = QUERIES) -> bool:
    """Whether all hits are those of a scan: the same rows, ties in order, each once."""
    prepared = inputs.prepare(queries, DIM, index.metric)
    view = index.view()
    walked = bulk.search_all(effort, prepared, view, scanned_rows_max=0)
    scanned = bulk.search_all(effort, prepared, view, scanned_rows_max=view.count)
    assert not plans.plan_search(effort, view, plans.SearchLimits(scanned_rows_max=0)).exact
    assert walked.distances.tobytes() == scanned.distances.tobytes()
    return walked.rows.tobytes() == scanned.rows.tobytes()


@pytest.mark.parametrize("where", [None, ~EqualFilter("part", 1)], ids=["all", "filtered"])
def test_search_returns_duplicates_in_row_order(index: Index, where: Filter | None) -> None:
    """The node itself may be deleted or excluded, and k may cover most of 200 duplicates."""
    assert index.view().chain is not None
    assert is_exact(index, Effort(k=10, top_m=64, where=where))
    if where is None:
        assert is_exact(index, Effort(k=150, top_m=200), QUERIES[:3])


def test_duplicates_take_no_routing_list_places(index: Index) -> None:
    """Each query has some 170 equal rows, and there is a node for each distinct vector."""
    rows, distances = index.search(DISTINCT[:3], Effort(k=20, top_m=20))
    assert (OF[rows] == np.arange(3)[:, None]).all()
    assert (distances == 0).all()
    nodes = duplicates.nodes(index.view().chain, len(index.graph))
    assert len(np.unique(OF[nodes])) == len(nodes), "one for each distinct vector"


def test_kernel_equals_reference_with_duplicates(index: Index) -> None:
    view = index.view()
    for effort in (Effort(k=10, top_m=24), Effort(k=7, top_m=24, where=~EqualFilter("part", 2))):
        prepared = inputs.prepare(QUERIES[:8], DIM, index.metric)
        for query in prepared:
            search = plans.search_of(effort, query[None], view, seeds=(5, 900, 3_999))
            rows, distances = Reference(search).run()
            hits = bulk.search_all(effort, query[None], view)
            cold = Reference(plans.search_of(effort, query[None], view)).run()
            assert cold[0].tobytes() == hits.rows[0].tobytes()
            assert cold[1].tobytes() == hits.distances[0].tobytes()
            assert len(set(rows.tolist())) == len(rows), "a copy may be a seed"
            assert (np.diff(distances) >= 0).all()


def test_compaction_keeps_node_with_live_rows() -> None:
    index = index_with_duplicates()
    view = index.view()
    assert view.alive is not None
    live = np.flatnonzero(unpack_bits(view.alive, view.count))
    index.compact()
    chain = index.view().chain
    assert chain is not None
    linked = len(index.graph)
    heads = duplicates.heads(chain)
    node_of = OF[live[:linked]]
    assert (node_of[heads] == node_of).all()
    nodes = duplicates.nodes(chain, linked)
    assert len(np.unique(node_of[nodes])) == len(nodes) == len(np.unique(node_of))
    assert np.isin(index.graph, nodes).all()
    assert is_exact(index, Effort(k=10, top_m=96))
    index.link()
    assert is_exact(index, Effort(k=10, top_m=96))


def test_loaded_duplicate_chain_links_like_original(tmp_path: Path) -> None:
    index = index_with_duplicates()
    snapshot.save(index, tmp_path / "index")
    read = snapshot.load(tmp_path / "index")
    effort = Effort(k=10, top_m=48)
    assert read.search(QUERIES, effort)[0].tobytes() == index.search(QUERIES, effort)[0].tobytes()
    for target in (index, read):
        target.link()
    assert read.view().chain is not None
    for array in ("graph", "chain", "entries"):
        assert getattr(read.view(), array).tobytes() == getattr(index.view(), array).tobytes()


def test_repeated_upserts_add_no_nodes() -> None:
    """The same documents arrive again and again: their nodes stay, whichever row lives."""
    index = Index.build(DISTINCT, degree=16, threads=1)
    for _ in range(3):
        index.upsert(range(900), DISTINCT[:900])
        while index.loose:
            index.link()
    assert len(duplicates.nodes(index.view().chain, len(index.graph))) == len(DISTINCT)
    assert is_exact(index, Effort(k=10, top_m=96))
    index.compact()
    assert index.view().chain is None
    assert is_exact(index, Effort(k=10, top_m=96))


@pytest.mark.parametrize("metric", list(Metric))
def test_search_orders_many_equal_rows(metric: Metric) -> None:
    index = Index.build(np.repeat(gaussian(1, 6), 3_000, axis=0), metric=metric)
    index.upsert(range(4_000, 4_100), np.repeat(gaussian(1, 6), 100, axis=0))
    index.link()
    for k in (1, 10, 500):
        rows, _ = index.search(gaussian(2, 6), Effort(k=k))
        assert rows.tolist() == [list(range(k))] * 2


def test_chain_version_stays_unchanged_while_read() -> None:
    index = Index.build(DISTINCT, degree=16, threads=1)
    views, whole = [], []
    for first in range(10_000, 10_600, 100):
        index.upsert(range(first, first + 100), DISTINCT[:100])
        index.link()
        views.append(index.view())
        whole.append([view.chain.tobytes() for view in views if view.chain is not None])
    last = [view.chain.tobytes() for view in views if view.chain is not None]
    assert [last[: len(chains)] for chains in whole] == whole
