"""Computes exact lists of nearest neighbours: products choose candidates, distances rank them.

Products choose some more candidates than are wanted, and the searches' own kernel computes their
distances, so lists and searches have the same numbers. If a cluster's width is a thousandth of its
distance from the middle of all rows, the choice among its rows is random: the rounding of products
exceeds their differences. `knn.py` calls this if there are few rows, audits if there are many.
"""

import numpy as np

from workers.vector.kernels import products
from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import (
    EMPTY,
    LIMIT,
    distance_of,
    insert,
    key_of,
    row_of,
    rows_and_distances,
)
from workers.vector.kernels.memory import address, get_u32
from workers.vector.kernels.metrics import SQUARED_L2
from workers.vector.kernels.parallel import over_rows
from workers.vector.kernels.products import GROUP, PANEL_ROWS, lowest, nearer

_SPARE = 8  # candidates beyond the wanted ones, because products round differently
_BLOCK = 64  # rows that are compared with a panel while it is in the cache
_PART_ROWS = 1 << 16  # rows of `nearest_others` that are in panels at a time
_BITS = 4 * GROUP * PANEL_ROWS  # offset of the bit sets in `nearer`'s output, in bytes


def dims_used(vectors: Array) -> int:
    """Return the number of dimensions without those at the end that are zero in all rows."""
    used = np.flatnonzero(vectors.any(0))
    return int(used[-1]) + 1 if len(used) else 1


def neighbours(vectors: Array, count: int, metric: int, stored: int, *, threads: int = 0) -> Array:
    """Do what `knn.neighbours` does, exactly and for any number of rows."""
    rows = len(vectors)
    single = vectors[:, : dims_used(vectors)].astype(np.float32)
    panels, lengths = _in_panels(single, metric)
    keys = np.full((rows, count), EMPTY, np.uint64)
    size = min(rows, count + 1 + _SPARE)
    over_rows(
        _nearest, rows, stored_bits(vectors), single, panels, lengths, size, keys, metric, stored,
        threads=threads,
    )  # fmt: skip
    return keys


def nearest_others(
    vectors: Array, rows: Array, count: int, metric: int, stored: int, *, threads: int = 0
) -> Array:
    """Return the rows nearest to each of `rows`, int64, without these: int64 (len(rows), count).

    A scan finds the same, but reads all vectors for each of `rows` and takes ten times as long.
    There must be at least `count` other rows.
    """
    single, bits = vectors[rows].astype(np.float32), stored_bits(vectors)
    lists = np.full((len(rows), count + _SPARE), EMPTY, np.uint64)
    worst = np.full(len(rows), np.inf, np.float32)
    for first in range(0, len(vectors), _PART_ROWS):
        panels, lengths = _in_panels(
            vectors[first : first + _PART_ROWS].astype(np.float32, copy=False), metric
        )
        inside = rows[(rows >= first) & (rows < first + _PART_ROWS)] - first
        lengths[inside] = np.inf
        over_rows(
            _nearest_of_part, len(rows), single, panels, lengths, first, lists, worst,
            threads=threads,
        )  # fmt: skip
    keys = np.full((len(rows), count), EMPTY, np.uint64)
    over_rows(_measure, len(rows), rows, bits, lists, 0, keys, metric, stored, threads=threads)
    nearest: Array = rows_and_distances(keys)[0]
    return nearest


def _in_panels(single: Array, metric: int) -> tuple[Array, Array]:
    """Return rows, float32, in panels, and their squares or 0; infinite for places without row."""
    panels = products.panels(single)
    lengths = np.full(len(panels) * PANEL_ROWS, np.inf, np.float32)  # no row: never near
    lengths[: len(single)] = np.einsum("ij,ij->i", single, single) if metric == SQUARED_L2 else 0
    return panels, lengths


@kernel
def _nearest_of_part(
    first: int, last: int, single: Array, panels: Array, lengths: Array, base: int, lists: Array,
    worst: Array,
) -> None:  # fmt: skip
    """Insert near rows of a part, from `base` on, into the lists of queries `first` to `last`.

    `single` are the queries, float32 (queries, dim); `lists` and `worst` are those of `_choose`.
    """
    dim = single.shape[1]
    groups = np.zeros((_BLOCK // GROUP, dim, GROUP), np.float32)
    limits = np.empty(_BLOCK, np.float32)
    for begin in range(first, last, _BLOCK):
        size = min(_BLOCK, last - begin)
        _group(single, begin, size, groups)
        limits[:size] = worst[begin : begin + size]
        limits[size:] = -np.inf
        _choose(groups, panels, lengths, base, lists[begin : begin + size], limits)
        worst[begin : begin + size] = limits[:size]


@kernel
def _nearest(
    first: int, last: int, vectors: Array, single: Array, panels: Array, lengths: Array,
    list_size: int, keys: Array, metric: int, stored: int,
) -> None:  # fmt: skip
    """Fill in the lists of rows `first` to `last`.

    `vectors` are stored bits, `single` float32 (rows, dim), `lengths` float32, a row's square or 0,
    infinite for places without a row. `list_size` is the number of candidates of a row.
    """
    dim, all_rows = single.shape[1], np.arange(len(single))
    groups = np.zeros((_BLOCK // GROUP, dim, GROUP), np.float32)
    lists = np.empty((_BLOCK, list_size), np.uint64)
    worst = np.empty(_BLOCK, np.float32)
    for begin in range(first, last, _BLOCK):
        size = min(_BLOCK, last - begin)
        _group(single, begin, size, groups)
        lists[:] = EMPTY
        worst[:] = np.inf
        worst[size:] = -np.inf
        _choose(groups, panels, lengths, 0, lists, worst)
        _measure(begin, begin + size, all_rows, vectors, lists, begin, keys, metric, stored)


@kernel
def _group(single: Array, begin: int, size: int, groups: Array) -> None:
    """Copy `size` rows of `single` from `begin` on to groups of queries."""
    for i in range(size):
        for d in range(single.shape[1]):
            groups[i // GROUP, d, i % GROUP] = single[begin + i, d]


@kernel
def _choose(
    groups: Array, panels: Array, lengths: Array, base: int, lists: Array, worst: Array
) -> None:
    """Insert the rows nearest to each query into `lists`, uint64 (queries, size), as keys.

    `groups` are the queries, float32 (queries / GROUP, dim, GROUP); `worst`, float32, is the value
    of the last entry of each list. Rows are numbered from `base` on.
    """
    dim, size = groups.shape[1], lists.shape[1]
    scratch = np.empty(GROUP * PANEL_ROWS + GROUP, np.float32)
    for panel in range(len(panels)):
        there = address(panels) + panel * panels.strides[0]
        squares = address(lengths) + 4 * PANEL_ROWS * panel
        for group in range(len(groups)):
            at = address(groups) + group * groups.strides[0]
            nearer(there, at, dim, squares, address(worst) + 4 * GROUP * group, address(scratch))
            for j in range(GROUP):
                bits, query = get_u32(address(scratch) + _BITS, j), GROUP * group + j
                while bits != np.uint32(0):
                    lane = lowest(bits)
                    bits &= bits - np.uint32(1)
                    dist = scratch[PANEL_ROWS * j + lane]
                    if dist < worst[query]:
                        insert(
                            address(lists) + query * lists.strides[0], size,
                            key_of(dist, base + PANEL_ROWS * panel + lane),
                        )  # fmt: skip
                        if lists[query, size - 1] < LIMIT:
                            worst[query] = distance_of(lists[query, size - 1])


@kernel
def _measure(
    first: int, last: int, rows: Array, vectors: Array, lists: Array, base: int, keys: Array,
    metric: int, stored: int,
) -> None:  # fmt: skip
    """Measure the candidates of rows[first] to rows[last], and keep the nearest in `keys`.

    The candidates of rows[i] are lists[i - base].
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    query = np.empty(length, np.float32)
    for i in range(first, last):
        row = rows[i]
        load(start + row * row_bytes, address(query), length, stored)
        for key in lists[i - base]:
            if key >= LIMIT:
                break
            candidate = row_of(key)
            if candidate != row:
                at = start + candidate * row_bytes
                dist = distance(at, address(query), length, metric, stored)
                insert(address(keys) + i * keys.strides[0], keys.shape[1], key_of(dist, candidate))
