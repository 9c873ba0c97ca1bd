"""Removes edges from graphs of data that spread in few directions.

In such data most edges of a row lead to rows that a search has met already. An edge is removed if
a shorter one leads nearly as near to its end: the rule of HNSW's heuristic (Malkov and Yashunin,
arXiv:1603.09320, algorithm 4), weakened by a factor, as in DiskANN (Subramanya et al., NeurIPS
2019). In data that spread in many directions the rule would remove edges that searches need, so
such a graph keeps all edges.
"""

import numpy as np

from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
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
