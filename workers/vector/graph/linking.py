"""Gives edges to appended rows, and repairs the graph where rows were deleted.

Theory of operation. New rows: their neighbours come from a search of the graph, and from a scan of
the rows that are linked with them. They keep the edges with the fewest detours, as in a build
(`build.py`), and are pushed into their neighbours' lists. The first half of a list is protected:
there a new row replaces the farthest one, if it is nearer (otherwise early rows would keep the long
edges of a small index). The displaced row, or else the new row, goes into the other half.

The eviction from that half decides which rows can be reached. A row that is among the nearest of no
other row (an "antihub": Radovanovic, Nanopoulos and Ivanovic, JMLR 2010) is found only by edges
that lead back to it, and these are in lists with much competition. So each edge has a rank: the
place of the list's row among the edges of the edge's end. Among the older half, the edge with the
worst rank is evicted, of equal ones the oldest; a build also gives places to reverse edges by rank.
When the oldest edge was evicted, 3.6 % of Gaussian rows were lost; by rank alone 0.4 %, but short
lists found less in data that spread in few directions.

Lengths and ranks are stored beside the graph: to measure lengths for each push took a sixth of
linking.

Deleted rows: a row with an edge to a deleted row gets the nearest of that row's neighbours instead
(Singh et al., "FreshDiskANN", arXiv:2105.09613, without its slack factor).

A graph that searches may be walking is never changed: `versions.py` makes room for the next one.
"""

from typing import Any, NamedTuple

import numpy as np

from workers.vector.graph.knn import even_spans, insert_peers
from workers.vector.kernels.arrays import Array, aligned, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import EMPTY, LIMIT, distance_of, insert, key_of, row_of
from workers.vector.kernels.memory import address, prefetch_row
from workers.vector.kernels.parallel import over_rows

UNKNOWN = np.float32(np.nan)  # length of an edge
_SCATTER = np.uint64(0x9E3779B97F4A7C15)
_DISPLACED = np.uint8(2)  # rank of a displaced row; 1 loses more rows, 8 finds less
_AHEAD = 4  # lists that are prefetched


class EdgeNotes(NamedTuple):
    """Lengths and ranks of the edges in a graph."""

    lengths: Array  # of the first half of each list, float32 (at least rows, degree / 2)
    # Of the other half, uint8 (at least rows, places there): the place of this row in the first
    # half of the list of the edge's end, or that half's size if it is not there.
    ranks: Array


def unknown_notes(rows: int, degree: int) -> EdgeNotes:
    """Allocate notes for the edges of this many rows, all of them UNKNOWN."""
    middle = degree // 2
    lengths = aligned(rows, middle, np.float32)
    lengths[:, :1] = UNKNOWN
    return EdgeNotes(lengths, aligned(rows, degree - middle, np.uint8))


def link_rows(
    graph: Array, notes: EdgeNotes, linked: int, new: Array, vectors: Array, nearest: Array,
    metric: int, stored: int, *, threads: int = 0,
) -> Array:  # fmt: skip
    """Fill in a graph from row `linked` on, in place; return the older rows whose edges changed,
    some more than once.

    `notes` are filled in, too; the first length of a list is UNKNOWN if it was never measured.

    `new`, int64, are the rows that get edges; all places of the others hold the row itself.
    `nearest` has shape (new rows, list length), int64: the linked rows that are nearest to each new
    one, -1 at the end of short lists.
    """
    added = len(graph) - linked
    keys = np.full((added, nearest.shape[1]), EMPTY, np.uint64)
    candidates = np.hstack([nearest, np.broadcast_to(new, (len(new), len(new)))])
    insert_peers(
        stored_bits(vectors), new, candidates.ravel(), even_spans(*candidates.shape), keys, metric,
        stored, base=linked, threads=threads,
    )  # fmt: skip
    lengths, ranks = notes
    ranks[linked : len(graph)] = lengths.shape[1]
    over_rows(_forward, added, keys, graph, lengths, linked, threads=threads)
    targets = graph[linked:, : lengths.shape[1]].copy()  # pushes also change the new rows' lists
    distances, rows = lengths[linked : len(graph)].copy(), np.arange(linked, len(graph))
    _backward(stored_bits(vectors), graph, lengths, ranks, rows, targets, distances, metric, stored)
    return targets[targets < linked]


def add_edges_to(
    graph: Array, notes: EdgeNotes, rows: Array, nearest: Array, vectors: Array, metric: int,
    stored: int,
) -> Array:  # fmt: skip
    """Push `rows`, int64, into the lists of the rows that are nearest to each, in place; return
    the rows whose edges changed, some more than once.

    `nearest` has shape (rows, list length), int64, -1 at the end of short lists.
    """
    near = nearest[:, : notes.lengths.shape[1]]
    targets = np.where(near < 0, rows[:, None], near).astype(np.uint32)
    distances = np.empty(targets.shape, np.float32)
    bits = stored_bits(vectors)
    for i in range(len(rows)):
        _measure(bits, rows[i], targets[i], metric, stored, distances[i])
    _backward(bits, graph, *notes, rows, targets, distances, metric, stored)
    return targets.ravel()


@kernel
def _forward(first: int, last: int, keys: Array, graph: Array, lengths: Array, linked: int) -> None:
    """Choose the candidates with the fewest detours as edges; ties in order of distance.

    Detours use the first half of an older row's edges: the others take as long and change no
    recall.

    For new rows `first` to `last`: from `keys`, uint64 (new rows, list length), to rows of `graph`,
    uint32 (linked + new rows, degree), from row `linked` on; unused places hold the row. Lengths go
    to `lengths`, float32 (at least as many rows, degree / 2).
    """
    size, degree = keys.shape[1], graph.shape[1]
    detours, after = np.empty(size, np.int64), np.empty(size + 2, np.int64)
    bits = 2
    while 1 << bits < 4 * size:
        bits += 1
    mask, shift = (1 << bits) - 1, np.uint64(64 - bits)
    edges = address(graph)
    rows, ranks = np.empty(mask + 1, np.int64), np.empty(mask + 1, np.int64)  # a hash table
    for i in range(first, last):
        count = 0
        rows[:] = -1
        while count < size and keys[i, count] < LIMIT:
            row = np.int64(row_of(keys[i, count]))
            place = np.int64(np.uint64(row) * _SCATTER >> shift)
            while rows[place] >= 0:
                place = (place + 1) & mask
            rows[place], ranks[place], detours[count] = row, count, 0
            if row < linked:
                prefetch_row(edges + row * graph.strides[0], graph.strides[0] // 2)
            count += 1
        for rank in range(count):
            between = row_of(keys[i, rank])
            for edge in range(degree // 2 if between < linked else size):
                if between < linked:
                    neighbour = np.int64(graph[between, edge])
                elif keys[between - linked, edge] < LIMIT:
                    neighbour = np.int64(row_of(keys[between - linked, edge]))
                else:
                    break
                place = np.int64(np.uint64(neighbour) * _SCATTER >> shift)
                while rows[place] >= 0 and rows[place] != neighbour:
                    place = (place + 1) & mask
                if rows[place] == neighbour and ranks[place] > rank:
                    detours[ranks[place]] += 1
        after[:] = 0
        for rank in range(count):
            after[detours[rank] + 1] += 1
        for detour_count in range(size):
            after[detour_count + 1] += after[detour_count]
        for rank in range(count):
            position = after[detours[rank]]
            after[detours[rank]] += 1
            if position < degree:
                graph[linked + i, position] = row_of(keys[i, rank])
            if position < lengths.shape[1]:
                lengths[linked + i, position] = distance_of(keys[i, rank])
        graph[linked + i, count:] = linked + i


@kernel
def _backward(
    vectors: Array, graph: Array, lengths: Array, ranks: Array, rows: Array, targets: Array,
    distances: Array, metric: int, stored: int,
) -> None:  # fmt: skip
    """Push each of `rows`, int64, into its neighbours' lists, worst edges first, so that the best
    stay longest.

    Changes `graph`, uint32 (all rows, degree), `lengths`, float32 (at least as many rows,
    degree / 2), and `ranks`, uint8 (at least as many rows, other places), in place. `targets`,
    uint32 (rows, degree / 2), are the rows to push into, nearest first, or the row itself for none;
    `distances`, float32, are theirs. `vectors` are stored bits. Unused places stay at the end.
    """
    degree, middle, edges = graph.shape[1], lengths.shape[1], address(graph)
    for place in range(middle - 1, -1, -1):
        for i in range(len(rows)):
            row, target = rows[i], np.int64(targets[i, place])
            if i + _AHEAD < len(rows):
                later = np.int64(targets[i + _AHEAD, place])
                prefetch_row(edges + later * graph.strides[0], graph.strides[0])
                prefetch_row(address(lengths) + later * lengths.strides[0], lengths.strides[0])
            if target == row:
                continue
            at = 0
            while at < degree and graph[target, at] != row and graph[target, at] != target:
                at += 1
            if at < middle and graph[target, at] == row:
                continue
            full = min(at, middle)
            if full > 0 and np.isnan(lengths[target, 0]):
                _measure(vectors, target, graph[target, :full], metric, stored, lengths[target])
                _rank(graph, target, ranks[target])
            if at == degree:
                at = degree - (degree - middle + 1) // 2
                for j in range(at, degree):
                    if ranks[target, j - middle] >= ranks[target, at - middle]:
                        at = j
            pushed, rank = np.uint32(row), np.uint8(place)
            length, farthest = distances[i, place], middle
            for j in range(full):
                if lengths[target, j] > length:
                    length, farthest = lengths[target, j], j
            for j in range(at, middle, -1):
                graph[target, j] = graph[target, j - 1]
                ranks[target, j - middle] = ranks[target, j - middle - 1]
            if farthest < middle:
                pushed, rank = graph[target, farthest], _DISPLACED
                graph[target, farthest], lengths[target, farthest] = row, distances[i, place]
            graph[target, full] = pushed
            if full < middle:
                lengths[target, full] = length
            else:
                ranks[target, full - middle] = rank


@kernel
def _measure(vectors: Array, row: Any, rows: Array, metric: int, stored: int, out: Array) -> None:
    """Write the distances of a row from others, integers, to `out`, float32, at least as long."""
    start, row_bytes, size = address(vectors), vectors.strides[0], vectors.shape[1]
    query = np.empty(size, np.float32)
    for i in range(len(rows)):
        prefetch_row(start + np.int64(rows[i]) * row_bytes, row_bytes)
    load(start + row * row_bytes, address(query), size, stored)
    for i in range(len(rows)):
        at = start + np.int64(rows[i]) * row_bytes
        out[i] = distance(at, address(query), size, metric, stored)


@kernel
def _rank(graph: Array, row: Any, ranks: Array) -> None:
    """Fill in the ranks of the second half of a row's list."""
    degree = graph.shape[1]
    middle = degree - len(ranks)
    for i in range(middle, degree):
        prefetch_row(address(graph) + np.int64(graph[row, i]) * graph.strides[0], 4 * middle)
    for i in range(middle, degree):
        neighbour, place = np.int64(graph[row, i]), 0
        while place < middle and graph[neighbour, place] != row:
            place += 1
        ranks[i - middle] = place


def drop_deleted(
    graph: Array, vectors: Array, live: Array, metric: int, stored: int, *,
    heads: Array | None = None, threads: int = 0,
) -> Array:  # fmt: skip
    """Return the graph of the live rows only, uint32 (len(live), degree): row i was live[i].

    `graph` is uint32 (rows, degree), `live` int64, ascending. `heads` are the nodes of live rows,
    if there are copies: the first live copy of a deleted node takes its place.
    """
    renumbered = np.full(len(graph), -1, np.int64)
    if heads is not None:
        dead, heirs = np.unique(heads, return_index=True)
        renumbered[dead] = heirs
        graph = graph.copy()
        graph[live[heirs]] = graph[dead]
    renumbered[live] = np.arange(len(live))
    out = np.empty((len(live), graph.shape[1]), np.uint32)
    over_rows(
        _drop_deleted,
        len(live),
        graph,
        stored_bits(vectors),
        live,
        renumbered,
        out,
        metric,
        stored,
        threads=threads,
    )
    return out


@kernel
def _drop_deleted(
    first: int, last: int, graph: Array, vectors: Array, live: Array, renumbered: Array,
    out: Array, metric: int, stored: int,
) -> None:  # fmt: skip
    """Write the edges of live rows `first` to `last` to `out`, uint32 (live rows, degree).

    From `graph`, uint32 (rows, degree), and `vectors`, stored bits. `live` is int64, ascending, and
    `renumbered`, int64 (rows,), is -1 for deleted rows.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    degree = graph.shape[1]
    query, spare = np.empty(length, np.float32), np.empty(degree, np.uint64)
    for i in range(first, last):
        row = live[i]
        load(start + row * row_bytes, address(query), length, stored)
        count = 0
        spare[:] = EMPTY
        for neighbour in graph[row]:
            if renumbered[neighbour] >= 0:
                if neighbour != row:
                    out[i, count] = renumbered[neighbour]
                    count += 1
                continue
            for second in graph[neighbour]:
                if renumbered[second] >= 0 and second != row:
                    at = start + np.int64(second) * row_bytes
                    far_key = key_of(distance(at, address(query), length, metric, stored), second)
                    insert(address(spare), degree, far_key)
        live_edges = count
        for key in spare:
            if key >= LIMIT or count == degree:
                break
            new, is_known = renumbered[row_of(key)], False
            for place in range(live_edges):
                is_known = is_known or out[i, place] == new
            if not is_known:
                out[i, count] = new
                count += 1
        out[i, count:] = i
