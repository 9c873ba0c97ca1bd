"""Edges among samples lead from one cluster to others."""

import numpy as np

from tests.workers.vector.data import gaussian, nearest, recall
from tests.workers.vector.graph.test_density import graph_and_vectors, squares
from workers.vector.graph import density, levels
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.metrics import SINGLE


def test_add_levels_adds_no_needless_edges() -> None:
    graph, vectors = graph_and_vectors(3)
    thin = density.thin_edges(graph, vectors, SINGLE)
    laid = levels.add_levels(thin, vectors, SINGLE, seed=1)
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
        levels.add_levels(thin, vectors, SINGLE, seed=seed, threads=threads).tobytes()
        for seed, threads in ((1, 1), (1, 3), (2, 1))
    )
    assert one_thread == three_threads != other_seed
    few = thin[:50] % 50
    assert levels.add_levels(few, vectors[:50], SINGLE, seed=1).tobytes() == few.tobytes()


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
