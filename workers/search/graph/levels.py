"""Edges among samples of the rows, where a graph has places left for them.

A row's nearest rows are those of its own cluster and of one or two others, so walks that begin
elsewhere never arrive. A level is a quarter of all rows, the next is half of it, and so on; each
row of a level may have edges to the nearest ones in it. That is what HNSW's levels are for (Malkov
and Yashunin, arXiv:1603.09320); here all of them lie in one graph, which is walked once.
"""

import numpy as np

from workers.search.graph import density, knn
from workers.search.kernels.arrays import Array, gather_rows
from workers.search.kernels.keys import LIMIT, rows_and_distances
from workers.search.kernels.metrics import SQUARED_L2

_FIRST, _FEWER = 4, 2  # times as few rows in the first level, and in each next one
_NEAREST = 48


def add_levels(graph: Array, vectors: Array, stored: int, *, seed: int, threads: int = 0) -> Array:
    """The graph with edges of all levels, nearest first.

    `graph` is uint32 (rows, degree); places that are left hold the row. `vectors` have shape (rows,
    padded dim), and `stored` says of what; distances are squared, whatever the metric.
    """
    graph = graph.copy()
    level = np.random.default_rng(seed).permutation(len(graph))[: len(graph) // _FIRST]
    while len(level) > _NEAREST:
        rows = np.sort(level)
        near = _nearest(vectors, rows, stored, seed, threads)
        graph[rows] = density.prune(
            np.hstack([graph[rows], near]), rows, vectors, stored, graph.shape[1], threads=threads
        )
        level = level[: len(level) // _FEWER]
    return graph


def _nearest(vectors: Array, rows: Array, stored: int, seed: int, threads: int) -> Array:
    """Of each of `rows`, int64, the nearest others of them, and itself where a list ends."""
    keys = knn.neighbours(
        gather_rows(vectors, rows), _NEAREST, SQUARED_L2, stored, seed=seed, threads=threads
    )
    self_places = np.arange(len(rows))[:, None]
    places = np.where(keys < LIMIT, rows_and_distances(keys)[0], self_places)
    nearest: Array = rows[places].astype(np.uint32)
    return nearest
