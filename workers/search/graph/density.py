"""Fewer edges where data spread in few directions.

There most edges of a row lead the same way, and a search looks at all of them to learn that it has
been there. An edge is left out where a shorter one leads nearly as near to its end: the rule of
HNSW's heuristic (Malkov and Yashunin, arXiv:1603.09320, algorithm 4), made weaker by a factor, as
DiskANN does (Subramanya et al., NeurIPS 2019). Where data spread in many directions that rule takes
edges that searches need, so there a graph keeps all that it has.
"""

import numpy as np

from workers.search.kernels.arrays import Array, stored_bits
from workers.search.kernels.distances import distance, load
from workers.search.kernels.jit import kernel
from workers.search.kernels.memory import address
from workers.search.kernels.metrics import SQUARED_L2
from workers.search.kernels.parallel import over_rows

_NEARER = np.float32(1.3)  # times so near the end, by squared distance
_SAMPLED_ROWS = 1_024
_FEW_SHARE = 0.5  # of the degree: where rows keep more on average, all edges stay


def thinned(graph: Array, vectors: Array, stored: int, *, threads: int = 0) -> Array:
    """The graph with the edges that are needed, nearest first, or as it is where most are.

    `graph` is uint32 (rows, degree); places that are left hold the row. `vectors` have shape (rows,
    padded dim), and `stored` says of what; distances are squared, whatever the metric.
    """
    if not len(graph):
        return graph
    bits = stored_bits(vectors)
    sample = np.arange(0, len(graph), max(1, len(graph) // _SAMPLED_ROWS))
    tried = np.empty((len(sample), graph.shape[1]), np.uint32)
    over_rows(_thinned, len(sample), graph, bits, stored, sample, tried, threads=threads)
    if (tried != sample[:, None]).sum(1).mean() > _FEW_SHARE * graph.shape[1]:
        return graph
    out = np.empty_like(graph)
    rows = np.arange(len(graph))
    over_rows(_thinned, len(graph), graph, bits, stored, rows, out, threads=threads)
    return out


@kernel
def _thinned(
    first: int, last: int, graph: Array, vectors: Array, stored: int, rows: Array, out: Array
) -> None:
    """Edges of rows[first] to rows[last], int64, to the same places of `out`, uint32."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    degree = graph.shape[1]
    here, there = np.empty(length, np.float32), np.empty(length, np.float32)
    far = np.empty(degree, np.float32)
    for i in range(first, last):
        row = rows[i]
        load(start + row * row_bytes, address(here), length, stored)
        for place in range(degree):
            other = np.int64(graph[row, place])
            far[place] = np.inf
            if other != row:
                at = start + other * row_bytes
                far[place] = distance(at, address(here), length, SQUARED_L2, stored)
        kept = 0
        for place in np.argsort(far, kind="mergesort"):
            if far[place] == np.inf:
                break
            other = np.int64(graph[row, place])
            load(start + other * row_bytes, address(there), length, stored)
            needed = True
            for j in range(kept):
                at = start + np.int64(out[i, j]) * row_bytes
                between = distance(at, address(there), length, SQUARED_L2, stored)
                if _NEARER * between < far[place]:
                    needed = False
                    break
            if needed:
                out[i, kept] = other
                kept += 1
        out[i, kept:] = row
