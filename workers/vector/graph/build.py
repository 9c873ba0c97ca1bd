"""Turns lists of nearest neighbours into a search graph of fixed degree, as CAGRA does.

Source: Ootomo, Naruse, Nolet, Wang, Feher and Wang, "CAGRA" (ICDE 2024), section on graph
optimisation. Edges that many two-hop detours replace are dropped, by rank alone. Half of the places
are for the remaining forward edges, and reverse edges can take the other half. No distance is
computed here. `components` finds the weak components of a graph: entry points must cover each of
them (`entry_points.py`).
"""

from typing import Protocol

import numpy as np

from workers.vector.graph import knn
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.forests import join
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import LIMIT, NOWHERE, row_of
from workers.vector.kernels.parallel import over_rows
from workers.vector.limits import CANDIDATES


class GraphOf(Protocol):
    """A backend's function that makes the search graph of stored vectors, (rows, padded dim).

    `metric` and `stored` are numbers of `metrics.py`. Returns uint32 (rows, degree): the rows that
    each row has edges to; unused places hold the row itself. Raises its device's errors.
    """

    def __call__(
        self, vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
    ) -> Array: ...


def own_graph(
    vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
) -> Array:
    """Make a graph on cores; see `GraphOf`."""
    count = int(degree * CANDIDATES)
    keys = knn.neighbours(vectors, count, metric, stored, seed=seed, threads=threads)
    return optimise_graph(keys, degree, threads=threads)


def optimise_graph(keys: Array, degree: int, *, threads: int = 0) -> Array:
    """Return the search graph of neighbour lists: uint32 (rows, degree).

    `keys` has shape (rows, list length), ascending, EMPTY at the end of short lists. Unused places
    of a row hold the row itself.
    """
    rows = len(keys)
    lists = np.empty(keys.shape, np.uint32)
    over_rows(_rows_of_keys, rows, keys, lists, threads=threads)
    forward = np.empty((rows, degree), np.uint32)
    over_rows(_prune, rows, lists, forward, threads=threads)
    backward, counts = np.empty((rows, degree), np.uint32), np.zeros(rows, np.int64)
    _reverse(forward, backward, counts)
    graph = np.empty((rows, degree), np.uint32)
    over_rows(_merge, rows, forward, backward, counts, graph, threads=threads)
    return graph


@kernel
def _rows_of_keys(first: int, last: int, keys: Array, lists: Array) -> None:
    """Write the rows of `keys`, uint64, to `lists`, uint32 of the same shape; empty: NOWHERE.

    All kernels here process rows `first` to `last`.
    """
    for row in range(first, last):
        for rank in range(keys.shape[1]):
            key = keys[row, rank]
            lists[row, rank] = NOWHERE if key >= LIMIT else row_of(key)


@kernel
def _prune(first: int, last: int, lists: Array, forward: Array) -> None:
    """Choose the edges with the fewest detours, in that order; ties in order of distance.

    From `lists`, uint32 (rows, list length), to `forward`, uint32 (rows, degree).
    """
    size, degree = lists.shape[1], forward.shape[1]
    place_of = np.zeros(len(lists), np.uint16)  # place of a row in the current list, from 1 on
    detours, after = np.empty(size + 1, np.int32), np.empty(size + 2, np.int32)
    for row in range(first, last):
        count = 0
        detours[:] = 0
        while count < size and lists[row, count] != NOWHERE:
            count += 1
            place_of[lists[row, count - 1]] = count
        for place in range(1, count + 1):
            for neighbour in lists[lists[row, place - 1]]:
                if neighbour == NOWHERE:
                    break
                rank = np.intp(place_of[neighbour])
                detours[rank] += rank > place  # without a branch, which could not be predicted
        after[:] = 0
        for place in range(1, count + 1):
            place_of[lists[row, place - 1]] = 0
            after[detours[place] + 1] += 1
        for detour_count in range(size):
            after[detour_count + 1] += after[detour_count]
        for place in range(1, count + 1):
            position = after[detours[place]]
            after[detours[place]] += 1
            if position < degree:
                forward[row, position] = lists[row, place - 1]
        forward[row, count:] = NOWHERE


@kernel
def _reverse(forward: Array, backward: Array, counts: Array) -> None:
    """Collect the rows that have a row in their lists, best places first, up to `degree`.

    Fills `backward`, uint32 (rows, degree), and `counts`, int64 (rows,), the list lengths.
    """
    degree = forward.shape[1]
    for place in range(degree):
        for row in range(len(forward)):
            neighbour = forward[row, place]
            if neighbour != NOWHERE and counts[neighbour] < degree:
                backward[neighbour, counts[neighbour]] = row
                counts[neighbour] += 1


@kernel
def _merge(
    first: int, last: int, forward: Array, backward: Array, counts: Array, graph: Array
) -> None:
    """Take half of the forward edges, then reverse edges, then the other forward edges.

    From `forward` and `backward`, uint32 (rows, degree), the latter with `counts` edges, int64
    (rows,), to `graph` of the same shape. Unused places hold the row.
    """
    degree = graph.shape[1]
    owner = np.full(len(graph), -1, np.int32)
    for row in range(first, last):
        owner[row] = row
        count = 0
        for turn in range(3):
            source = backward[row, : counts[row]] if turn == 1 else forward[row]
            for place in range(len(source)):
                neighbour = source[place]
                if neighbour == NOWHERE or owner[neighbour] == row:
                    continue
                if count < degree and (turn > 0 or place < degree // 2):
                    owner[neighbour] = row
                    graph[row, count] = neighbour
                    count += 1
        graph[row, count:] = row


@kernel
def components(graph: Array) -> Array:
    """Return the smallest row of each row's weak component: int64 (rows,) (union-find).

    `graph` is uint32 (rows, degree).
    """
    parent = np.arange(len(graph))
    for row in range(len(graph)):
        for neighbour in graph[row]:
            join(parent, row, np.int64(neighbour))
    for row in range(len(graph)):
        parent[row] = parent[parent[row]]  # parents are smaller rows, which are final already
    return parent
