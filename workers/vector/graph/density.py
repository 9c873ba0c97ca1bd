"""Removes edges from graphs of data that spread in few directions, and adds others in their place.

In such data most edges of a row lead to rows that a search has met already. An edge is removed if
a shorter one leads nearly as near to its end: the rule of HNSW's heuristic (Malkov and Yashunin,
arXiv:1603.09320, algorithm 4), weakened by a factor, as in DiskANN (Subramanya et al., NeurIPS
2019). In data that spread in many directions the rule would remove edges that searches need, so
such a graph keeps all edges.

Unused places get edges among samples of the rows. A row's nearest rows are in its own cluster and
in one or two others, so walks that begin elsewhere never arrive. HNSW's levels have the same
purpose; here all levels are in one graph, which is walked once.
"""

import numpy as np

from workers.vector.graph import knn
from workers.vector.kernels.arrays import Array, gather_rows, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import LIMIT, rows_and_distances
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import SQUARED_L2
from workers.vector.kernels.parallel import over_rows

_NEARER = np.float32(1.3)  # a removed edge's squared length, over that of its detour's last part
_SAMPLED_ROWS = 1_024
_FEW_SHARE = 0.5  # of the degree; if rows would keep more on average, all edges stay


def thin_edges(graph: Array, vectors: Array, stored: int, *, threads: int = 0) -> Array:
    """Return the graph with the needed edges, nearest first, or unchanged if most are needed.

    `graph` is uint32 (rows, degree); unused places hold the row. `vectors` have shape (rows, padded
    dim), and `stored` is their storage; distances are squared ones for any metric.
    """
    if not len(graph):
        return graph
    degree, rows = graph.shape[1], np.arange(len(graph))
    sample = rows[:: max(1, len(rows) // _SAMPLED_ROWS)]
    sample_edges = prune(graph[sample], sample, vectors, stored, degree, threads=threads)
    if (sample_edges != sample[:, None]).sum(1).mean() > _FEW_SHARE * degree:
        return graph
    return prune(graph, rows, vectors, stored, degree, threads=threads)


def prune(
    candidates: Array, rows: Array, vectors: Array, stored: int, degree: int, *, threads: int = 0
) -> Array:
    """Choose each row's candidates that no shorter edge makes needless, nearest first.

    `candidates` are uint32 (rows, candidates), the row itself for none, and `rows` int64 (rows,).
    Returns uint32 (rows, degree); unused places hold the row.
    """
    out = np.empty((len(rows), degree), np.uint32)
    over_rows(
        _prune, len(rows), candidates, stored_bits(vectors), stored, rows, out, threads=threads
    )
    return out


@kernel
def _prune(
    first: int, last: int, candidates: Array, vectors: Array, stored: int, rows: Array, out: Array
) -> None:
    """Write the edges of rows[first] to rows[last], int64, to the same places of `out`, uint32."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    count, degree = candidates.shape[1], out.shape[1]
    here, there = np.empty(length, np.float32), np.empty(length, np.float32)
    distances = np.empty(count, np.float32)
    for i in range(first, last):
        row = rows[i]
        load(start + row * row_bytes, address(here), length, stored)
        for place in range(count):
            candidate = np.int64(candidates[i, place])
            distances[place] = np.inf
            if candidate != row:
                at = start + candidate * row_bytes
                distances[place] = distance(at, address(here), length, SQUARED_L2, stored)
        kept_count = 0
        for place in np.argsort(distances, kind="mergesort"):
            if distances[place] == np.inf or kept_count == degree:
                break
            candidate = np.int64(candidates[i, place])
            load(start + candidate * row_bytes, address(there), length, stored)
            is_needed = True
            for j in range(kept_count):
                at = start + np.int64(out[i, j]) * row_bytes
                between = distance(at, address(there), length, SQUARED_L2, stored)
                if out[i, j] == candidate or _NEARER * between < distances[place]:
                    is_needed = False
                    break
            if is_needed:
                out[i, kept_count] = candidate
                kept_count += 1
        out[i, kept_count:] = row


_FIRST, _FEWER = 4, 2  # divisors of the rows for the first level, and for each next one
_NEAREST = 48


def add_levels(graph: Array, vectors: Array, stored: int, *, seed: int, threads: int = 0) -> Array:
    """Return the graph with edges of all levels, nearest first.

    The first level is a quarter of all rows, the next is half of it, and so on; each row of a level
    may get edges to the nearest rows in it.

    `graph` is uint32 (rows, degree); unused places hold the row. `vectors` have shape (rows, padded
    dim), and `stored` is their storage; distances are squared ones for any metric.
    """
    graph = graph.copy()
    level = np.random.default_rng(seed).permutation(len(graph))[: len(graph) // _FIRST]
    while len(level) > _NEAREST:
        rows = np.sort(level)
        near = _nearest(vectors, rows, stored, seed, threads)
        graph[rows] = prune(
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
