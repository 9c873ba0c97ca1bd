"""Lists of nearest neighbours of every row: exact for few rows, NN-descent for many.

Exact: blocks of the matrix product choose candidates, with some to spare, and the kernel that
searches use computes their distances, so both see the same numbers. NN-descent (Dong, Moses and Li,
WWW 2011): whoever is near a neighbour is likely near. It starts from the leaves of random
projection trees (Dasgupta and Freund, STOC 2008) and here each row gathers for itself from lists
that do not change meanwhile: twice the distances of the published form, but no locks, and the same
result for a seed on any number of threads.

A list is an ascending row of keys (`keys.py`); its flag says that an entry is not new any more.
"""

from typing import Any

import numpy as np

from workers.search.compiled import inlined, kernel
from workers.search.distances import INNER_PRODUCT, distance, load, stored_bits
from workers.search.keys import EMPTY, FLAG, insert, key_of, row_of
from workers.search.memory import address, prefetch_row
from workers.search.parallel import over_rows

Array = np.ndarray[Any, Any]

EXACT_ROWS_MAX = 20_000
_LEAF_ROWS = 96
TREES = 3
SAMPLE = 26  # entries of a list, and of a reverse list, that take part in a round
ROUNDS_MAX = 8
ENOUGH = 0.005  # changed share of all entries below which another round is not worth it
_SPARE = 8  # candidates beyond the wanted ones: the matrix product rounds differently
_BLOCK_ROWS = 1_024


def neighbours(
    vectors: Array, count: int, metric: int, stored: int, *, seed: int = 0, threads: int = 0
) -> Array:
    """Keys of the nearest other rows of each row: shape (rows, count), uint64, ascending.

    `vectors` has shape (rows, padded dim), contiguous. Lists of fewer than `count` other rows end
    with EMPTY.
    """
    if len(vectors) <= EXACT_ROWS_MAX:
        return _exact(vectors, count, metric, stored, threads)
    return _descend(vectors, count, metric, stored, seed, threads)


def _exact(vectors: Array, count: int, metric: int, stored: int, threads: int) -> Array:
    rows = len(vectors)
    keys = np.full((rows, count), EMPTY, np.uint64)
    single = vectors.astype(np.float32, copy=False)
    norms = np.einsum("ij,ij->i", single, single) if metric == 0 else np.zeros(rows, np.float32)
    wanted = min(rows, count + 1 + _SPARE)
    for first in range(0, rows, _BLOCK_ROWS):
        last = min(rows, first + _BLOCK_ROWS)
        scores = norms - 2 * (single[first:last] @ single.T)
        if wanted < rows:
            found = np.argpartition(scores, wanted - 1, axis=1)[:, :wanted]
        else:
            found = np.broadcast_to(np.arange(rows), scores.shape)
        found = np.ascontiguousarray(found, np.int64)
        over_rows(
            _take, last - first, stored_bits(vectors), keys, found, first, metric, stored,
            threads=threads,
        )  # fmt: skip
    return keys


@kernel
def _take(
    first: int, last: int, vectors: Array, keys: Array, found: Array, base: int, metric: int,
    stored: int,
) -> None:  # fmt: skip
    """Insert candidates, one row of `found` for each row from `base` on."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    lists, list_bytes = address(keys), keys.strides[0]
    query = np.empty(length, np.float32)
    for i in range(first, last):
        row = base + i
        load(start + row * row_bytes, address(query), length, stored)
        for other in found[i]:
            if other != row:
                at = start + other * row_bytes
                key = key_of(distance(at, address(query), length, metric, stored), other)
                insert(lists + row * list_bytes, keys.shape[1], key)


def _descend(
    vectors: Array, count: int, metric: int, stored: int, seed: int, threads: int
) -> Array:
    rows, vectors = len(vectors), stored_bits(vectors)
    keys = np.full((rows, count), EMPTY, np.uint64)
    random = np.random.default_rng(seed)
    for _ in range(TREES):
        order, bounds = leaves(vectors, stored, random)
        over_rows(
            _join_leaves, len(bounds) - 1, vectors, keys, order, bounds, metric, stored,
            threads=threads,
        )  # fmt: skip
    for _ in range(ROUNDS_MAX):
        reverse = np.empty((rows, SAMPLE), np.uint64)
        turn_round(keys, reverse)
        after = keys.copy()
        changed = over_rows(
            _round, rows, vectors, keys, reverse, after, metric, stored, threads=threads
        )
        keys = after
        if sum(changed) < ENOUGH * rows * count:
            break
    return keys


def leaves(vectors: Array, stored: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Rows in an order in which near ones stand together, and where each group begins and ends."""
    rows = len(vectors)
    order = np.arange(rows)
    levels = max(0, int(np.ceil(np.log2(rows / _LEAF_ROWS))))
    bounds = np.array([0, rows])
    for _ in range(levels):
        split = np.empty(2 * len(bounds) - 1, np.int64)
        split[::2] = bounds
        split[1::2] = (bounds[:-1] + bounds[1:]) // 2
        pairs = random.random((len(bounds) - 1, 2))
        _split(vectors, stored, order, bounds, pairs)
        bounds = split
    return order, bounds


@kernel
def _split(vectors: Array, stored: int, order: Array, bounds: Array, pairs: Array) -> None:
    """Cut each group in two halves along the line between two of its rows."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    line, far = np.empty(length, np.float32), np.empty(length, np.float32)
    for group in range(len(bounds) - 1):
        first, last = bounds[group], bounds[group + 1]
        size = last - first
        one = order[first + int(pairs[group, 0] * size)]
        other = order[first + int(pairs[group, 1] * size)]
        load(start + one * row_bytes, address(line), length, stored)
        load(start + other * row_bytes, address(far), length, stored)
        for d in range(length):
            line[d] -= far[d]
        values = np.empty(size, np.float32)
        for i in range(size):
            at = start + order[first + i] * row_bytes
            values[i] = distance(at, address(line), length, INNER_PRODUCT, stored)
        places = np.argsort(values)
        taken = order[first:last].copy()
        for i in range(size):
            order[first + i] = taken[places[i]]


@kernel
def _join_leaves(
    first: int, last: int, vectors: Array, keys: Array, order: Array, bounds: Array, metric: int,
    stored: int,
) -> None:  # fmt: skip
    """Introduce all rows of a leaf to each other; a row is in one leaf, so threads do not meet."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    lists, list_bytes = address(keys), keys.strides[0]
    query = np.empty(length, np.float32)
    for leaf in range(first, last):
        for i in range(bounds[leaf], bounds[leaf + 1]):
            row = order[i]
            load(start + row * row_bytes, address(query), length, stored)
            for j in range(bounds[leaf], bounds[leaf + 1]):
                other = order[j]
                if other != row:
                    at = start + other * row_bytes
                    key = key_of(distance(at, address(query), length, metric, stored), other)
                    insert(lists + row * list_bytes, keys.shape[1], key)


@kernel
def turn_round(keys: Array, reverse: Array) -> None:
    """For each row the first rows that have it in their lists, nearest ranks first."""
    rows = len(keys)
    counts = np.zeros(rows, np.int64)
    reverse[:] = EMPTY
    for rank in range(min(SAMPLE, keys.shape[1])):
        for row in range(rows):
            key = keys[row, rank]
            if key >= EMPTY - FLAG:
                continue
            other = row_of(key)
            if counts[other] < SAMPLE:
                reverse[other, counts[other]] = key_of(np.float32(0), row) | (key & FLAG)
                counts[other] += 1


@kernel
def _round(
    first: int, last: int, vectors: Array, keys: Array, reverse: Array, after: Array, metric: int,
    stored: int,
) -> int:  # fmt: skip
    """Rows first to last gather from their neighbours' lists; how many entries are new."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    lists, list_bytes = address(after), after.strides[0]
    seen = np.full(len(keys), -1, np.int32)
    query, pending = np.empty(length, np.float32), np.empty(4 * SAMPLE * SAMPLE, np.int64)
    changed = 0
    for row in range(first, last):
        load(start + row * row_bytes, address(query), length, stored)
        seen[row] = row
        for key in keys[row]:
            if key < EMPTY - FLAG:
                seen[row_of(key)] = row
        found = _gathered(row, keys, reverse, seen, pending)
        for i in range(keys.shape[1]):
            after[row, i] |= FLAG
        for i in range(found):
            if i + 6 < found:
                prefetch_row(start + pending[i + 6] * row_bytes, row_bytes)
            at = start + pending[i] * row_bytes
            key = key_of(distance(at, address(query), length, metric, stored), pending[i])
            insert(lists + row * list_bytes, keys.shape[1], key)
        for key in after[row]:
            changed += key & FLAG == 0
    return changed


@inlined
def _gathered(row: int, keys: Array, reverse: Array, seen: Array, pending: Array) -> int:
    """Rows two steps away that were not met before: over an edge that is new, at least one."""
    found = 0
    sample = min(SAMPLE, keys.shape[1])
    for i in range(2 * SAMPLE):
        if i >= SAMPLE:
            near = reverse[row, i - SAMPLE]
        elif i < sample:
            near = keys[row, i]
        else:
            continue
        if near >= EMPTY - FLAG:
            continue
        between, joined = row_of(near), near & FLAG
        for j in range(2 * SAMPLE):
            if j >= SAMPLE:
                far = reverse[between, j - SAMPLE]
            elif j < sample:
                far = keys[between, j]
            else:
                continue
            if far >= EMPTY - FLAG or (joined and far & FLAG):
                continue
            other = row_of(far)
            if seen[other] != row:
                seen[other] = row
                pending[found] = other
                found += 1
    return found
