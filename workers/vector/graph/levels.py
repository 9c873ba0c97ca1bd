"""Adds edges among samples of the rows, if a graph has unused places for them.

A row's nearest rows are in its own cluster and in one or two others, so walks that begin elsewhere
never arrive. The first level is a quarter of all rows, the next is half of it, and so on; each row
of a level may get edges to the nearest rows in it. HNSW's levels have the same purpose (Malkov and
Yashunin, arXiv:1603.09320); here all levels are in one graph, which is walked once.
"""

import numpy as np

from workers.vector.graph import density, knn
from workers.vector.kernels.arrays import Array, gather_rows
from workers.vector.kernels.keys import LIMIT, rows_and_distances
from workers.vector.kernels.metrics import SQUARED_L2

_FIRST, _FEWER = 4, 2  # divisors of the rows for the first level, and for each next one
_NEAREST = 48


def add_levels(graph: Array, vectors: Array, stored: int, *, seed: int, threads: int = 0) -> Array:
    """Return the graph with edges of all levels, nearest first.

    `graph` is uint32 (rows, degree); unused places hold the row. `vectors` have shape (rows, padded
    dim), and `stored` is their storage; distances are squared ones for any metric.
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
    """Return for each of `rows`, int64, the nearest others of them; short lists end with itself."""
    keys = knn.neighbours(
        gather_rows(vectors, rows), _NEAREST, SQUARED_L2, stored, seed=seed, threads=threads
    )
    self_places = np.arange(len(rows))[:, None]
    places = np.where(keys < LIMIT, rows_and_distances(keys)[0], self_places)
    nearest: Array = rows[places].astype(np.uint32)
    return nearest
