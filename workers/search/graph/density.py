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


def thin_edges(graph: Array, vectors: Array, stored: int, *, threads: int = 0) -> Array:
    """The graph with the edges that are needed, nearest first, or as it is where most are.

    `graph` is uint32 (rows, degree); places that are left hold the row. `vectors` have shape (rows,
    padded dim), and `stored` says of what; distances are squared, whatever the metric.
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
    """Of each row's candidates those that no shorter edge makes needless, nearest first.

    `candidates` are uint32 (rows, candidates), the row itself where there is none, and `rows` int64
    (rows,). Returns uint32 (rows, degree); places that are left hold the row.
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
    """Edges of rows[first] to rows[last], int64, to the same places of `out`, uint32."""
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
