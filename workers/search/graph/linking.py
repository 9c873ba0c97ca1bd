"""Gives edges to rows that were appended, and mends the graph where rows were deleted.

New rows: their neighbours come from a search of the graph, and from a scan of the rows that are
linked with them. They keep the edges with the fewest detours, as in a build (`build.py`), and push
themselves into the middle of their neighbours' lists: the nearest half of a list is protected, the
last entry goes. Deleted rows: who had an edge to one takes the nearest of that one's neighbours
instead (Singh et al., "FreshDiskANN", arXiv:2105.09613, without its slack factor).

Graphs are never changed in place; searches may be walking them.
"""

import numpy as np

from workers.search.graph.knn import even_spans, introduce
from workers.search.kernels.arrays import Array, stored_bits
from workers.search.kernels.distances import distance, load
from workers.search.kernels.jit import kernel
from workers.search.kernels.keys import EMPTY, LIMIT, insert, key_of, row_of
from workers.search.kernels.memory import address
from workers.search.kernels.parallel import over_rows


def extended(
    graph: Array, vectors: Array, found: Array, metric: int, stored: int, *, threads: int = 0
) -> Array:
    """The graph with rows len(graph) to len(graph) + len(found) added.

    `found` has shape (new rows, list length), int64: the linked rows that are nearest to each new
    one, -1 at the end of short lists.
    """
    linked, added, degree = len(graph), len(found), graph.shape[1]
    keys = np.full(found.shape, EMPTY, np.uint64)
    new = np.arange(linked, linked + added)
    candidates = np.hstack([found, np.broadcast_to(new, (added, added))])
    introduce(
        stored_bits(vectors), new, candidates.ravel(), even_spans(*candidates.shape), keys, metric,
        stored, base=linked, threads=threads,
    )  # fmt: skip
    out = np.empty((linked + added, degree), np.uint32)
    out[:linked] = graph
    over_rows(_forward, added, keys, out, linked, threads=threads)
    _backward(out, linked)
    return out


@kernel
def _forward(first: int, last: int, keys: Array, graph: Array, linked: int) -> None:
    """The candidates with the fewest detours, as edges; ties stay in order of distance.

    Of new rows `first` to `last`: from `keys`, uint64 (new rows, list length), to rows of `graph`,
    uint32 (linked + new rows, degree), from row `linked` on. Places that are left hold the row.
    """
    size, degree = keys.shape[1], graph.shape[1]
    detours = np.empty(size, np.int64)
    for i in range(first, last):
        found = 0
        while found < size and keys[i, found] < LIMIT:
            detours[found] = 0
            found += 1
        for rank in range(found):
            between = row_of(keys[i, rank])
            for place in range(degree if between < linked else size):
                if between < linked:
                    far = np.int64(graph[between, place])
                elif keys[between - linked, place] < LIMIT:
                    far = np.int64(row_of(keys[between - linked, place]))
                else:
                    break
                for other in range(rank + 1, found):
                    if row_of(keys[i, other]) == far:
                        detours[other] += 1
        kept, fewest = 0, 0
        while kept < degree and kept < found:
            for rank in range(found):
                if detours[rank] == fewest and kept < degree:
                    graph[linked + i, kept] = row_of(keys[i, rank])
                    kept += 1
            fewest += 1
        graph[linked + i, kept:] = linked + i


@kernel
def _backward(graph: Array, linked: int) -> None:
    """Push each new row into its neighbours' lists, worst edges first: the best stay longest.

    In place, in `graph`, uint32 (linked + new rows, degree).
    """
    degree = graph.shape[1]
    middle = degree // 2
    for place in range(middle - 1, -1, -1):
        for row in range(linked, len(graph)):
            other = graph[row, place]
            if other == row:
                continue
            at = 0
            while at < degree and graph[other, at] != row:
                at += 1
            if at < middle:
                continue
            at = min(at, degree - 1)
            while at < degree - 1 and graph[other, at] == other:  # an empty place
                at += 1
            for i in range(at, middle, -1):
                graph[other, i] = graph[other, i - 1]
            graph[other, middle] = row


def mended(
    graph: Array, vectors: Array, live: Array, metric: int, stored: int, *, threads: int = 0
) -> Array:
    """The graph of the live rows alone, renumbered in their order: row i is what live[i] was.

    `graph` is uint32 (rows, degree), `live` int64, ascending; shape (len(live), degree), uint32.
    """
    renumbered = np.full(len(graph), -1, np.int64)
    renumbered[live] = np.arange(len(live))
    out = np.empty((len(live), graph.shape[1]), np.uint32)
    over_rows(
        _mend,
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
def _mend(
    first: int, last: int, graph: Array, vectors: Array, live: Array, renumbered: Array,
    out: Array, metric: int, stored: int,
) -> None:  # fmt: skip
    """Edges of live rows `first` to `last`, to `out`, uint32 (live rows, degree).

    From `graph`, uint32 (rows, degree), and `vectors`, stored bits. `live` is int64, ascending, and
    `renumbered`, int64 (rows,), is -1 for deleted rows.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    degree = graph.shape[1]
    query, spare = np.empty(length, np.float32), np.empty(degree, np.uint64)
    for i in range(first, last):
        row = live[i]
        load(start + row * row_bytes, address(query), length, stored)
        kept = 0
        spare[:] = EMPTY
        for other in graph[row]:
            if renumbered[other] >= 0:
                if other != row:
                    out[i, kept] = renumbered[other]
                    kept += 1
                continue
            for far in graph[other]:
                if renumbered[far] >= 0 and far != row:
                    at = start + np.int64(far) * row_bytes
                    far_key = key_of(distance(at, address(query), length, metric, stored), far)
                    insert(address(spare), degree, far_key)
        live_edges = kept
        for key in spare:
            if key >= LIMIT or kept == degree:
                break
            new, known = renumbered[row_of(key)], False
            for place in range(live_edges):
                known = known or out[i, place] == new
            if not known:
                out[i, kept] = new
                kept += 1
        out[i, kept:] = i
