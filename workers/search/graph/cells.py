"""Entry points in cells, so that a search measures those of the nearest cells alone.

Each entry point belongs to the nearest of some that are drawn, the *pivots* (by squared distance,
whatever the metric is). A query is compared with the pivots first, then with the entry points of
the cells whose pivots are nearest to it: about four times the root of their number, not all.
"""

from typing import NamedTuple

import numpy as np

from workers.search.kernels.arrays import Array, stored_bits
from workers.search.kernels.distances import distance, load
from workers.search.kernels.jit import kernel
from workers.search.kernels.memory import address
from workers.search.kernels.metrics import SQUARED_L2
from workers.search.walk.fields import PIVOTS_MAX, PROBES

_ENTRIES_MIN = 48  # fewer are measured as fast


class Cells(NamedTuple):
    """Where each entry point belongs."""

    order: Array  # entry points cell by cell, ascending in each, int64
    bounds: Array  # where each cell begins in `order`, int64 (cells + 1,)
    pivots: Array  # rows, ascending, int64
    vectors: Array  # theirs


def of(vectors: Array, entries: Array, stored: int) -> Cells | None:
    """Cells of `entries`, int64, ascending; None where they are too few for any."""
    if len(entries) < _ENTRIES_MIN:
        return None
    count = min(PIVOTS_MAX, int(np.sqrt(PROBES * len(entries))))
    pivots = np.sort(np.random.default_rng(0).choice(entries, count, replace=False))
    beside = np.ascontiguousarray(vectors[pivots])
    cell_of = _nearest(stored_bits(vectors), entries, stored_bits(beside), stored)
    order = entries[np.argsort(cell_of, kind="stable")]
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(cell_of, minlength=count), out=bounds[1:])
    return Cells(np.ascontiguousarray(order), bounds, pivots, beside)


@kernel
def _nearest(vectors: Array, entries: Array, pivots: Array, stored: int) -> Array:
    """The nearest pivot of each of `entries`, int64; the first of several.

    `vectors` and `pivots` are stored bits, shapes (rows, padded dim) and (pivots, padded dim).
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    query, out = np.empty(length, np.float32), np.zeros(len(entries), np.int64)
    for i in range(len(entries)):
        load(start + entries[i] * row_bytes, address(query), length, stored)
        least = np.float32(np.inf)
        for j in range(len(pivots)):
            at = address(pivots) + j * pivots.strides[0]
            far = distance(at, address(query), length, SQUARED_L2, stored)
            if far < least:
                least, out[i] = far, j
    return out
