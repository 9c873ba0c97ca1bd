"""Computes lists of nearest neighbours of every row: exact for few rows, NN-descent for many.

Exact: each row is compared with all others (`exact.py`). NN-descent (Dong, Moses and Li, WWW 2011):
a neighbour of a neighbour is likely near. It starts from the leaves of random projection trees
(`trees.py`). Here each row gathers candidates from lists that do not change during a round: that
takes twice the distances of the published form, but no locks, and the result for a seed is the same
on any number of threads. Most candidates are too far for the list; their codes show it
(`codes.py`), and the lists are the same as without codes.

A list is an ascending row of keys (`keys.py`); a key's flag marks an entry that is no longer new.
"""

from typing import Any

import numpy as np

from workers.vector.graph import exact, trees
from workers.vector.kernels import codes
from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.codes import CODED_QUERY_BYTES, encode_query, prefilter
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.keys import (
    EMPTY,
    FLAG,
    LIMIT,
    NOWHERE,
    distance_of,
    insert,
    key_of,
    row_of,
    rows_and_distances,
)
from workers.vector.kernels.memory import address, get_i64, get_u32, prefetch_row, put_i64, put_u32
from workers.vector.kernels.metrics import INNER_PRODUCT
from workers.vector.kernels.parallel import over_rows

EXACT_ROWS_MAX = 12_000
TREES = 3
SAMPLE = 26  # entries of a list, and of a reverse list, that take part in a round
ROUNDS_MAX = 8
ENOUGH = 0.005  # changed share of all entries below which another round is not worth it
_LONG = 2  # times the median length, from which rows may be near all others by length alone
_MOST = 0.5  # share of a list's entries
_SOME = 32  # rows that are sampled
_PREFILTER_ROWS = 64  # rows after which the distance of a list's end is read again
_AHEAD = 6  # rows that are prefetched
_NO_CODES = codes.Codes(np.empty((0, 0), np.uint8), np.empty(0, np.float32))
_NO_OUTLIERS = np.empty(0, np.uint32)


def neighbours(
    vectors: Array, count: int, metric: int, stored: int, *, seed: int = 0, threads: int = 0
) -> Array:
    """Return the keys of each row's nearest other rows: (rows, count), uint64, ascending.

    `vectors` has shape (rows, padded dim), contiguous; `metric` and `stored` are numbers of
    `metrics.py`. Lists of fewer than `count` other rows end with EMPTY. `threads` 0: all cores.
    """
    if len(vectors) <= EXACT_ROWS_MAX:
        return exact.neighbours(vectors, count, metric, stored, threads=threads)
    return _descend(vectors, count, metric, stored, seed, threads)


def insert_peers(
    vectors: Array, rows: Array, peers: Array, spans: Array, keys: Array, metric: int,
    stored: int, *, base: int = 0, threads: int = 0,
) -> None:  # fmt: skip
    """Insert peers[spans[i, 0] : spans[i, 1]] into the list of rows[i], keys[rows[i] - base].

    `vectors` are stored bits; `rows`, `peers` and `spans`, of shape (len(rows), 2), are int64,
    `keys` is uint64. No row occurs twice in `rows`. Peers of -1, and the row itself, are skipped.
    """
    over_rows(
        _insert_peers, len(rows), vectors, rows, peers, spans, keys, base, metric, stored,
        threads=threads,
    )  # fmt: skip


def even_spans(count: int, size: int) -> Array:
    """Return the spans of `count` adjacent groups of one size: shape (count, 2), int64."""
    spans: Array = np.arange(count)[:, None] * size + [0, size]
    return spans


def spans_of(bounds: Array) -> Array:
    """Return for each member of groups the span of its group: shape (members, 2), int64.

    Group i has places bounds[i] to bounds[i + 1].
    """
    return np.repeat(np.stack([bounds[:-1], bounds[1:]], 1), np.diff(bounds), axis=0)


@kernel
def _insert_peers(
    first: int, last: int, vectors: Array, rows: Array, peers: Array, spans: Array, keys: Array,
    base: int, metric: int, stored: int,
) -> None:  # fmt: skip
    """Do the work of `insert_peers` for rows[first] to rows[last]."""
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    query = np.empty(length, np.float32)
    for i in range(first, last):
        row = rows[i]
        load(start + row * row_bytes, address(query), length, stored)
        list_address = address(keys) + (row - base) * keys.strides[0]
        last = spans[i, 1]
        for j in range(spans[i, 0], last):
            peer = peers[j]
            if j + _AHEAD < last:
                prefetch_row(start + max(0, peers[j + _AHEAD]) * row_bytes, row_bytes)
            if peer >= 0 and peer != row:
                at = start + peer * row_bytes
                key = key_of(distance(at, address(query), length, metric, stored), peer)
                insert(list_address, keys.shape[1], key)


def _descend(
    vectors: Array, count: int, metric: int, stored: int, seed: int, threads: int
) -> Array:
    row_codes = codes.encode_rows(vectors, metric, threads=threads) or _NO_CODES
    rows, vectors = len(vectors), stored_bits(vectors)
    keys = np.full((rows, count), EMPTY, np.uint64)
    random = np.random.default_rng(seed)
    for _ in range(TREES):
        order, bounds = trees.leaves(vectors, stored, random)
        insert_peers(vectors, order, order, spans_of(bounds), keys, metric, stored, threads=threads)
    if metric == INNER_PRODUCT:
        insert_longest(vectors, keys, stored, random, threads=threads)
    for _ in range(ROUNDS_MAX):
        reverse = np.empty((rows, SAMPLE), np.uint64)
        reverse_lists(keys, reverse)
        near, counts = np.empty((rows, 2 * SAMPLE), np.uint32), np.empty((rows, 2), np.int64)
        over_rows(_sample, rows, keys, reverse, near, counts, threads=threads)
        after = keys | FLAG
        changed = over_rows(
            _round, rows, vectors, keys, near, counts, after, metric, stored, row_codes.codes,
            row_codes.quantizer,
        _NO_OUTLIERS if row_codes.outliers is None else row_codes.outliers, threads=threads,
        )  # fmt: skip
        keys = after
        if sum(changed) < ENOUGH * rows * count:
            break
    return keys


def insert_longest(
    vectors: Array, keys: Array, stored: int, random: np.random.Generator, *, threads: int = 0
) -> None:
    """Insert the longest rows into all lists if, by inner product, most neighbours are such rows.

    Trees and rounds seldom lead to these rows: a neighbour's neighbour is no nearer than any other
    row of the same length. The test uses the exact lists of a few rows. `vectors` are stored bits,
    `keys` uint64 (rows, list length).
    """
    rows, count = keys.shape
    squares = np.empty(rows, np.float32)
    over_rows(_squares, rows, vectors, stored, squares, threads=threads)
    every, longest = np.arange(rows), np.argsort(-squares, kind="stable")[:count]
    if squares[longest[-1]] < _LONG**2 * np.median(squares):
        return
    sample = random.choice(rows, min(_SOME, rows), replace=False)
    spans = np.tile([0, rows], (len(sample), 1))
    insert_peers(vectors, sample, every, spans, keys, INNER_PRODUCT, stored, threads=threads)
    nearest, _ = rows_and_distances(keys[sample])
    if np.isin(nearest, longest).mean() > _MOST:
        spans = np.tile([0, len(longest)], (rows, 1))
        insert_peers(vectors, every, longest, spans, keys, INNER_PRODUCT, stored, threads=threads)


@kernel
def _squares(first: int, last: int, vectors: Array, stored: int, squares: Array) -> None:
    line = np.empty(vectors.shape[1], np.float32)
    for row in range(first, last):
        at = address(vectors) + row * vectors.strides[0]
        load(at, address(line), len(line), stored)
        squares[row] = -distance(at, address(line), len(line), INNER_PRODUCT, stored)


@kernel
def reverse_lists(keys: Array, reverse: Array) -> None:
    """Collect for each row the first rows that have it in their lists, best ranks first.

    From `keys`, uint64 (rows, list length), to `reverse`, uint64 (rows, SAMPLE), as keys at
    distance 0 with the flag of the entry; EMPTY at the end of short lists.
    """
    rows = len(keys)
    counts = np.zeros(rows, np.int64)
    reverse[:] = EMPTY
    for rank in range(min(SAMPLE, keys.shape[1])):
        for row in range(rows):
            key = keys[row, rank]
            if key >= LIMIT:
                continue
            neighbour = row_of(key)
            if counts[neighbour] < SAMPLE:
                reverse[neighbour, counts[neighbour]] = key_of(np.float32(0), row) | (key & FLAG)
                counts[neighbour] += 1


@kernel
def _sample(first: int, last: int, keys: Array, reverse: Array, near: Array, counts: Array) -> None:
    """Select each row's entries for a round, new ones first.

    The rows go to `near`, uint32 (rows, 2 * SAMPLE); the number of new ones and the total go to
    `counts`, int64 (rows, 2).
    """
    for row in range(first, last):
        total = 0
        for old in range(2):
            for source in (keys, reverse):
                for rank in range(min(SAMPLE, source.shape[1])):
                    key = source[row, rank]
                    if key < LIMIT and np.int64(key & FLAG) == old:
                        near[row, total] = row_of(key)
                        total += 1
            counts[row, old] = total


@kernel
def _round(
    first: int, last: int, vectors: Array, keys: Array, near: Array, counts: Array, after: Array,
    metric: int, stored: int, codes: Array, quantizer: Array, outliers: Array,
) -> int:  # fmt: skip
    """Extend the lists of rows `first` to `last` by candidates; return the number of new entries.

    `near` and `counts` are those of `_sample`. Lists of `keys` are read, and those of `after`, of
    the same shape, are written. `codes` and `quantizer` are those of `Codes`; no rows: no codes.
    `outliers` is the bit set of rows that always pass; no words: none.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    visited_by = np.full(len(keys), NOWHERE, np.uint32)
    query, pending = np.empty(length, np.float32), np.empty(4 * SAMPLE * SAMPLE, np.int64)
    scratch, coded = np.empty(length, np.float32), np.empty(CODED_QUERY_BYTES, np.uint8)
    size, changed = keys.shape[1], 0
    for row in range(first, last):
        load(start + row * row_bytes, address(query), length, stored)
        if len(codes):
            levels = address(quantizer)
            encode_query(address(query), levels, length, metric, address(coded), address(scratch))
        visited_by[row] = row
        for key in keys[row]:
            if key < LIMIT:
                visited_by[row_of(key)] = row
        pending_count = _gather(row, near, counts, address(visited_by), address(pending))
        for begin in range(0, pending_count, _PREFILTER_ROWS):
            rows, total = address(pending) + 8 * begin, min(_PREFILTER_ROWS, pending_count - begin)
            if len(codes) and after[row, size - 1] < LIMIT:
                worst = distance_of(after[row, size - 1])
                total = _prefilter(rows, total, worst, codes, outliers, address(coded), metric)
            for i in range(total):
                if i + _AHEAD < total:
                    prefetch_row(start + get_i64(rows, i + _AHEAD) * row_bytes, row_bytes)
                peer = get_i64(rows, i)
                dist = distance(start + peer * row_bytes, address(query), length, metric, stored)
                insert(address(after) + row * after.strides[0], size, key_of(dist, peer))
        for key in after[row]:
            changed += key & FLAG == 0
    return changed


@inlined
def _prefilter(
    rows: int, total: int, worst: Any, codes: Array, outliers: Array, query: int, metric: int
) -> int:
    """Prefetch the codes of `total` rows, int64 at an address, and call `codes.prefilter`."""
    for i in range(total):
        prefetch_row(address(codes) + get_i64(rows, i) * codes.strides[0], codes.strides[0])
    passing = address(outliers) if len(outliers) else 0
    return prefilter(rows, total, worst, address(codes), codes.strides[0], passing, query, metric)


@inlined
def _gather(row: int, near: Array, counts: Array, visited_by: int, pending: int) -> int:
    """Collect the rows two steps away that were not met before, with at least one new step.

    Writes them to `pending`, the address of 4 * SAMPLE * SAMPLE int64, and returns their number.
    `visited_by` is the address of a uint32 for each row of the index: the row that met it last.
    """
    count, lists, list_bytes = 0, address(near), near.strides[0]
    for i in range(counts[row, 1]):
        prefetch_row(lists + near[row, i] * list_bytes, list_bytes)
    for i in range(counts[row, 1]):
        between, is_old = np.int64(near[row, i]), i >= counts[row, 0]
        for j in range(counts[between, 0 if is_old else 1]):
            peer = get_u32(lists + between * list_bytes, j)
            put_i64(pending, count, np.int64(peer))
            count += get_u32(visited_by, np.int64(peer)) != np.uint32(row)
            put_u32(visited_by, np.int64(peer), np.uint32(row))
    return count
