"""Finds rows that are equal up to rounding, for example one text that was embedded twice.

This holds only if distances are products: those of such rows differ by less than float32 rounding.
Rows are sorted by their product with one random vector. Equal rows have nearly equal products, so
each row is compared only with the few before it.
"""

from typing import Any

import numpy as np

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.distances import distance
from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import INNER_PRODUCT, SINGLE, SQUARED_L2

_ROUNDED = 2.0**-21  # of a row's norm: eight times the rounding of a value
_LOOKED_AT = 32  # rows before a row that it is compared with


def are_merged(vectors: Array, metric: int) -> bool:
    """Return whether such rows count as equal: float32 rows, by inner product or cosine."""
    return metric == INNER_PRODUCT and vectors.dtype == np.float32


def first_equal(vectors: Array, rows: Array) -> Array:
    """Return for each of `rows`, int64 and ascending, the first that is equal: int64 (rows,).

    `vectors` have shape (rows, padded dim).
    """
    line = np.random.default_rng(0).standard_normal(vectors.shape[1]).astype(np.float32)
    products = _products(vectors, rows, line)
    order = np.argsort(products, kind="stable")
    reach = 2 * _ROUNDED * float(np.linalg.norm(line))
    return _first_equal(vectors, rows, products, order, reach)


@kernel
def match_equal_rows(vectors: Array, rows: Array, candidates: Array) -> Array:
    """Return for each of `rows` its first candidate that is equal: int64, -1 for none.

    `candidates` is int64 (rows, list length), -1 at the end of short lists.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    out = np.full(len(rows), -1, np.int64)
    for i in range(len(rows)):
        at = start + rows[i] * row_bytes
        limit = _limit(_square(at, length))
        for candidate in candidates[i]:
            if candidate >= 0 and _is_equal(at, start + candidate * row_bytes, length, limit):
                out[i] = candidate
                break
    return out


@inlined
def _square(row: int, length: int) -> Any:
    """Return the squared norm of the row at an address."""
    return -distance(row, row, length, INNER_PRODUCT, SINGLE)


@inlined
def _limit(square: Any) -> Any:
    """Return the squared distance from a row up to which others equal it."""
    return np.float32(_ROUNDED * _ROUNDED) * square


@inlined
def _is_equal(first: int, second: int, length: int, limit: Any) -> Any:
    """Return whether rows at two addresses are equal up to rounding; the limit is the first's."""
    return distance(second, first, length, SQUARED_L2, SINGLE) <= limit


@kernel
def _products(vectors: Array, rows: Array, line: Array) -> Array:
    """Return the products of `rows`, int64, with a vector, float32 (padded dim,)."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    out = np.empty(len(rows), np.float32)
    for i in range(len(rows)):
        at = start + rows[i] * row_bytes
        out[i] = -distance(at, address(line), length, INNER_PRODUCT, SINGLE)
    return out


@kernel
def _first_equal(vectors: Array, rows: Array, products: Array, order: Array, reach: float) -> Array:
    """Do the work of `first_equal` for `rows` in the order of their products, float32 (rows,).

    Rows are equal if they equal the same lead, the first of them in that order. `reach` is the
    largest difference between products of equal rows of norm 1.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    lead, first = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    limits = np.empty(len(rows), np.float32)
    for place in range(len(order)):
        i = order[place]
        lead[i] = first[i] = i
        at = start + rows[i] * row_bytes
        square = _square(at, length)
        limits[i], norm = _limit(square), np.sqrt(square)
        for before in range(place - 1, max(-1, place - 1 - _LOOKED_AT), -1):
            j = order[before]
            if products[i] - products[j] > reach * norm:
                break
            if _is_equal(start + rows[lead[j]] * row_bytes, at, length, limits[lead[j]]):
                lead[i] = lead[j]
                first[lead[j]] = min(first[lead[j]], i)
                break
    out = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        out[i] = rows[first[lead[i]]]
    return out
