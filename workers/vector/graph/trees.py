"""Random projection trees (Dasgupta and Freund, STOC 2008): groups of rows that are likely near.

The computation of nearest neighbours starts with these groups (`knn.py`).
"""

import numpy as np

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import INNER_PRODUCT

_LEAF_ROWS = 96
_FIRST_CUT = (0.35, 0.65)  # range of the first cut; halves could be the same in all trees


def leaves(vectors: Array, stored: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Return rows in an order with near ones together, and the bounds of groups in it.

    Both are int64, shapes (rows,) and (groups + 1,): group i has places bounds[i] to bounds[i + 1].
    `vectors` are stored bits, shape (rows, padded dim), and `stored` is their storage.
    """
    rows = len(vectors)
    order = np.arange(rows)
    levels = max(0, int(np.ceil(np.log2(rows / _LEAF_ROWS))))
    bounds = np.array([0, rows])
    share = random.uniform(*_FIRST_CUT)
    for _ in range(levels):
        split = np.empty(2 * len(bounds) - 1, np.int64)
        split[::2] = bounds
        split[1::2] = bounds[:-1] + (share * np.diff(bounds)).astype(np.int64)
        share = 0.5
        pairs = random.random((len(bounds) - 1, 2))
        _split(vectors, stored, order, bounds, pairs)
        bounds = split
    return order, bounds


@kernel
def _split(vectors: Array, stored: int, order: Array, bounds: Array, pairs: Array) -> None:
    """Sort each group of rows along the line between two of its rows.

    `vectors` are stored bits; `order`, int64 (rows,), is sorted within each group of `bounds`,
    int64 (groups + 1,). `pairs`, float64 (groups, 2) from 0 to 1, are the places of the two rows.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    line, end = np.empty(length, np.float32), np.empty(length, np.float32)
    for group in range(len(bounds) - 1):
        first, last = bounds[group], bounds[group + 1]
        size = last - first
        first_row = order[first + int(pairs[group, 0] * size)]
        second_row = order[first + int(pairs[group, 1] * size)]
        load(start + first_row * row_bytes, address(line), length, stored)
        load(start + second_row * row_bytes, address(end), length, stored)
        for d in range(length):
            line[d] -= end[d]
        values = np.empty(size, np.float32)
        for i in range(size):
            at = start + order[first + i] * row_bytes
            values[i] = distance(at, address(line), length, INNER_PRODUCT, stored)
        places = np.argsort(values)
        group_rows = order[first:last].copy()
        for i in range(size):
            order[first + i] = group_rows[places[i]]
