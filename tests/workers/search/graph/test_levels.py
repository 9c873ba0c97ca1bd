"""Edges among samples lead from one cluster to others."""

import numpy as np

from tests.workers.search.data import gaussian, nearest, recall
from tests.workers.search.graph.test_density import made, squares
from workers.search.graph import density, levels
from workers.search.index.index import Index
from workers.search.index.query import Effort
from workers.search.kernels.metrics import SINGLE


def test_edges_of_all_levels_are_added_and_none_is_needless() -> None:
    graph, vectors = made(3)
    thin = density.thin_edges(graph, vectors, SINGLE)
    laid = levels.add_levels(thin, vectors, SINGLE, seed=1)
    own = np.arange(len(thin))[:, None]
    before, after = (thin != own).sum(1), (laid != own).sum(1)
    assert (after >= before).all() and 0.15 < (after > before).mean() <= 0.25
    for row in range(0, len(laid), 29):
        edges = laid[row, : after[row]].astype(int)
        assert (laid[row, after[row] :] == row).all() and len(set(edges)) == len(edges)
        far = squares(vectors, row, edges)
        for other in set(thin[row, : before[row]].astype(int)) - set(edges):  # a nearer one came
            mine = squares(vectors, row, np.array([other]))[0]
            assert (1.3 * squares(vectors, other, edges[far <= mine])).min() <= mine * (1 + 1e-5)
        assert (np.diff(far) >= 0).all()
        for place in range(1, len(edges)):
            between = squares(vectors, edges[place], edges[:place])
            assert (1.3 * between).min() >= far[place] * (1 - 1e-5)


def test_seeds_choose_samples_and_threads_change_nothing() -> None:
    graph, vectors = made(3)
    thin = density.thin_edges(graph, vectors, SINGLE)
    one, two, other = (
        levels.add_levels(thin, vectors, SINGLE, seed=seed, threads=threads).tobytes()
        for seed, threads in ((1, 1), (1, 3), (2, 1))
    )
    assert one == two != other
    few = thin[:50] % 50
    assert levels.add_levels(few, vectors[:50], SINGLE, seed=1).tobytes() == few.tobytes()


def test_rays_of_a_few_rows_each_are_found_by_short_lists() -> None:
    """Lists of the nearest hold little but the own ray."""
    random = np.random.default_rng(2)
    ends = gaussian(800, 48, seed=3) * 10
    rows = np.repeat(ends, 12, axis=0) * random.normal(1, 0.1, (9_600, 1)).astype(np.float32)
    queries = ends[:200] * random.normal(1, 0.1, (200, 1)).astype(np.float32)
    index = Index.build(rows)
    assert (index.graph == np.arange(9_600)[:, None]).mean() > 0.4  # thinned
    found = index.search(queries, Effort(k=10, top_m=10))[0]
    assert recall(found, nearest(rows, queries, 10)) >= 0.95
