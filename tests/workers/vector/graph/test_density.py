"""Edges that a shorter one makes needless are left out, where that are most of them."""

from dataclasses import replace

import numpy as np
import pytest

from infra.bench.search.zoo.kinds import one_dimension
from tests.workers.vector.data import gaussian, nearest, neighbour_lists, recall
from workers.vector.graph import build, density
from workers.vector.index.index import Index
from workers.vector.index.inputs import prepare
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexAudit
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import SINGLE, Metric, Storage


def graph_and_vectors(dim: int, rows: int = 2_000) -> tuple[Array, Array]:
    vectors = gaussian(rows, dim, seed=3)
    stored = prepare(vectors, dim, Metric.SQEUCLIDEAN, Storage.FLOAT32)
    return build.optimise_graph(neighbour_lists(vectors, 32), 24), stored


def squares(vectors: Array, row: int, targets: Array) -> Array:
    far: Array = ((vectors[targets].astype(np.float64) - vectors[row]) ** 2).sum(1)
    return far


def test_thin_edges_drops_edges_covered_by_shorter_ones() -> None:
    graph, vectors = graph_and_vectors(2)
    thin = density.thin_edges(graph, vectors, Storage.FLOAT32.number)
    counts = (thin != np.arange(len(thin))[:, None]).sum(1)
    assert counts.min() >= 1 and counts.mean() < 12
    for row in range(0, len(graph), 37):
        thin_edges, edges = thin[row, : counts[row]].astype(int), graph[row].astype(int)
        assert (thin[row, counts[row] :] == row).all()
        far = squares(vectors, row, thin_edges)
        assert (np.diff(far) >= 0).all() and set(thin_edges) <= set(edges)
        for dropped_edge in set(edges) - set(thin_edges) - {row}:
            length = squares(vectors, row, np.array([dropped_edge]))[0]
            shorter = thin_edges[far <= length]
            assert (1.3 * squares(vectors, dropped_edge, shorter)).min() <= length * (1 + 1e-5)


def test_thin_edges_returns_graph_when_most_edges_are_needed() -> None:
    graph, vectors = graph_and_vectors(40)
    assert density.thin_edges(graph, vectors, Storage.FLOAT32.number) is graph
    empty = graph[:0]
    assert density.thin_edges(empty, vectors[:0], Storage.FLOAT32.number) is empty


def test_thin_edges_does_not_depend_on_threads() -> None:
    graph, vectors = graph_and_vectors(3)
    first, second = (density.thin_edges(graph, vectors, 0, threads=threads) for threads in (1, 3))
    assert first.tobytes() == second.tobytes() != graph.tobytes()


def test_thinned_index_keeps_recall_and_fills_empty_places() -> None:
    vectors, queries = gaussian(5_000, 6, seed=5), gaussian(100, 6, seed=6)
    index = Index.build(vectors[:4_000], metric=Metric.SQEUCLIDEAN)
    before = (index.graph != np.arange(4_000)[:, None]).sum()
    index.upsert(range(4_000, 5_000), vectors[4_000:])
    while index.link():
        pass
    after = index.graph[:4_000] != np.arange(4_000)[:, None]
    assert after.sum() > before
    assert (np.diff(after.astype(int), axis=1) <= 0).all()  # empty places stay at the end
    truth = nearest(vectors, queries, 10)
    assert recall(index.search(queries, Effort(k=10, top_m=64))[0], truth) >= 0.99


def test_inner_product_graph_keeps_its_edges() -> None:
    index = Index.build(gaussian(3_000, 3), metric=Metric.INNER_PRODUCT, degree=16)
    assert (index.graph != np.arange(3_000)[:, None]).sum(1).mean() > 14


def test_line_data_needs_usual_entry_points_only() -> None:
    """Equal splits of all trees left borders: 4 635 of 50 000 rows became entry points."""
    vectors, _ = one_dimension(14_000, 0)
    index = Index.build(vectors)
    assert index.audit is not None and index.audit.missed_share <= 0.002
    assert len(index.entries) <= 260


@pytest.mark.parametrize("are_enough", [True, False])
def test_inner_product_graph_is_thinned_when_audit_allows(
    are_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    audits = list[IndexAudit]()

    def serves(few: IndexAudit, full: IndexAudit) -> bool:
        audits[:] = full, few
        return are_enough

    monkeypatch.setattr(IndexAudit, "serves_as_well_as", serves)
    vectors, queries = gaussian(6_000, 5, seed=5), gaussian(100, 5, seed=6)
    index = Index.build(vectors, metric=Metric.INNER_PRODUCT)
    edges = (index.graph != np.arange(6_000)[:, None]).sum(1).mean()
    assert (edges < 16) == are_enough
    assert index.audit is audits[are_enough]
    assert audits[0].efforts[0][0] == audits[1].efforts[0][0] == 16
    rows, _ = index.search(queries, Effort(k=10, top_m=64))
    exact = np.argsort(-queries @ vectors.T, axis=1)[:, :10]
    assert recall(rows, exact) >= 0.95


def audit(*shares: float) -> IndexAudit:
    efforts = tuple(
        (length, share, 0.0) for length, share in zip((16, 32, 64), shares, strict=True)
    )
    return IndexAudit(rows=1, entries=1, rounds=1, missed_share=0.0, calibrated=1, efforts=efforts)


def test_audit_accepts_thin_graph_when_no_list_finds_less() -> None:
    full = audit(0.90, 0.95, 0.99)
    assert audit(0.90, 0.949, 0.995).serves_as_well_as(full)
    assert not audit(0.95, 0.99, 0.98).serves_as_well_as(full)
    assert not audit(0.88, 0.99, 0.99).serves_as_well_as(full)
    assert not replace(full, efforts=()).serves_as_well_as(full), "nothing was measured"


def test_add_levels_adds_no_needless_edges() -> None:
    graph, vectors = graph_and_vectors(3)
    thin = density.thin_edges(graph, vectors, SINGLE)
    laid = density.add_levels(thin, vectors, SINGLE, seed=1)
    row_numbers = np.arange(len(thin))[:, None]
    before, after = (thin != row_numbers).sum(1), (laid != row_numbers).sum(1)
    assert (after >= before).all() and 0.15 < (after > before).mean() <= 0.25
    for row in range(0, len(laid), 29):
        edges = laid[row, : after[row]].astype(int)
        assert (laid[row, after[row] :] == row).all() and len(set(edges)) == len(edges)
        far = squares(vectors, row, edges)
        for replaced_edge in set(thin[row, : before[row]].astype(int)) - set(
            edges
        ):  # a nearer one came
            length = squares(vectors, row, np.array([replaced_edge]))[0]
            assert (1.3 * squares(vectors, replaced_edge, edges[far <= length])).min() <= length * (
                1 + 1e-5
            )
        assert (np.diff(far) >= 0).all()
        for place in range(1, len(edges)):
            between = squares(vectors, edges[place], edges[:place])
            assert (1.3 * between).min() >= far[place] * (1 - 1e-5)


def test_add_levels_depends_on_seed_not_threads() -> None:
    graph, vectors = graph_and_vectors(3)
    thin = density.thin_edges(graph, vectors, SINGLE)
    one_thread, three_threads, other_seed = (
        density.add_levels(thin, vectors, SINGLE, seed=seed, threads=threads).tobytes()
        for seed, threads in ((1, 1), (1, 3), (2, 1))
    )
    assert one_thread == three_threads != other_seed
    few = thin[:50] % 50
    assert density.add_levels(few, vectors[:50], SINGLE, seed=1).tobytes() == few.tobytes()


def test_short_lists_find_rays_of_few_rows() -> None:
    """Lists of nearest neighbours hold little but rows of the own ray."""
    random = np.random.default_rng(2)
    ends = gaussian(800, 48, seed=3) * 10
    rows = np.repeat(ends, 12, axis=0) * random.normal(1, 0.1, (9_600, 1)).astype(np.float32)
    queries = ends[:200] * random.normal(1, 0.1, (200, 1)).astype(np.float32)
    index = Index.build(rows)
    assert (index.graph == np.arange(9_600)[:, None]).mean() > 0.4  # thinned
    rows_found = index.search(queries, Effort(k=10, top_m=10))[0]
    assert recall(rows_found, nearest(rows, queries, 10)) >= 0.95
