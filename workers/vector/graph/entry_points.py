"""Chooses a graph's entry points: rows spread over the data, at least one in every component.

Representatives are farthest points (the k-center heuristic of Gonzalez, 1985): each is the row that
is farthest from all chosen so far. A search begins at those nearest to its query. Random entry
points alone find a quarter of the neighbours in data with separate clusters; so do representatives
alone if outliers or wide clusters take all of them. So there are equally many of both. An audit
finds the rows that neither reach (`audit.py`).
"""

import numpy as np

from workers.vector.graph.build import components
from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.forests import join
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.panels import PANEL_DIM_MAX

REPRESENTATIVES_MIN, REPRESENTATIVES_MAX = 64, 1_024
_SAMPLED_PER_REPRESENTATIVE = 32


def representatives(
    vectors: Array, graph: Array, nodes: Array, metric: int, stored: int, *, seed: int = 0
) -> Array:
    """Choose entry rows from `nodes`, int64; return them, ascending, int64 (count,).

    `vectors` has shape (rows, padded dim), `graph` shape (rows, degree), uint32. They are about
    sqrt(rows) representatives, half as many of long vectors, from a sample if there are many rows;
    as many random rows; and the smallest row of each weak component that has none.
    """
    count = usual_count(len(nodes), vectors.shape[1])
    if count >= len(nodes):
        return nodes
    random, sampled = np.random.default_rng(seed), nodes
    if len(nodes) > count * _SAMPLED_PER_REPRESENTATIVE:
        sampled = np.sort(random.choice(nodes, count * _SAMPLED_PER_REPRESENTATIVE, replace=False))
    spread = _farthest(stored_bits(vectors), sampled, count, metric, stored)
    random_rows = random.choice(nodes, count, replace=False)
    return cover_components(np.union1d(spread, random_rows), graph)


def usual_count(rows: int, length: int) -> int:
    """Return the number of representatives, and of random entry points, of a new index.

    `length` is the padded dim. Long vectors are not in panels, so each costs a search more time.
    """
    return int(np.clip(_root(rows, length), REPRESENTATIVES_MIN, REPRESENTATIVES_MAX))


def _root(rows: int, length: int) -> float:
    return float(np.sqrt(rows)) / (1 if length <= PANEL_DIM_MAX else 2)


def extend(
    entries: Array, first: int, among: Array, vectors: Array, graph: Array, metric: int, stored: int
) -> Array:
    """Add entry points to `entries`, int64, for the rows from `first` on and islands of these.

    `among`, int64, are the rows to choose from. The total stays in proportion to the root of the
    rows, because each search measures all entry points. Islands of older rows, which lost their
    edges to others, wait for `cover_components`.
    """
    length = vectors.shape[1]
    count = min(len(among), int(2 * _root(len(graph), length)) - int(2 * _root(first, length)))
    chosen = _farthest(stored_bits(vectors), among, count, metric, stored)
    roots = _islands(graph, first)
    lone = np.setdiff1d(roots, roots[chosen - first])
    added = np.union1d(chosen, lone[lone >= first])
    return np.union1d(entries, added) if len(added) else entries  # the same array keeps caches


def cover_components(chosen: Array, graph: Array) -> Array:
    """Add an entry row for each weak component that has none; return all, ascending."""
    roots = components(graph)
    return np.union1d(chosen, np.setdiff1d(roots, roots[chosen]))


@kernel
def _islands(graph: Array, first: int) -> Array:
    """Return for each row from `first` on the smallest row of its island, -1 if it is in none.

    An island has no edge to an older row. Returns int64 (rows from `first` on,) (union-find).
    `graph` is uint32 (rows, degree).
    """
    parent = np.arange(len(graph) - first + 1)  # place 0 stands for all older rows
    for row in range(first, len(graph)):
        for neighbour in graph[row]:
            source, target = row - first + 1, np.int64(neighbour) - first + 1
            if target < 0:
                target = np.int64(0)
            join(parent, source, target)
    out = np.empty(len(graph) - first, np.int64)
    for place in range(1, len(parent)):
        parent[place] = parent[parent[place]]
        out[place - 1] = first + parent[place] - 1 if parent[place] else -1
    return out


@kernel
def _farthest(vectors: Array, sampled: Array, count: int, metric: int, stored: int) -> Array:
    """Choose `count` rows of `sampled`, int64, that are far apart: int64 (count,).

    `vectors` are stored bits, shape (rows, padded dim). At least `count` rows are sampled.
    """
    start, row_bytes, length = address(vectors), vectors.strides[0], vectors.shape[1]
    nearest = np.full(len(sampled), np.inf, np.float32)
    chosen = np.empty(count, np.int64)
    query = np.empty(length, np.float32)
    pick = 0
    for i in range(count):
        chosen[i] = sampled[pick]
        load(start + sampled[pick] * row_bytes, address(query), length, stored)
        nearest[pick] = -np.inf
        farthest = np.float32(-np.inf)
        for j in range(len(sampled)):
            if nearest[j] == -np.inf:
                continue
            at = start + sampled[j] * row_bytes
            dist = distance(at, address(query), length, metric, stored)
            nearest[j] = min(nearest[j], dist)
            if nearest[j] > farthest:
                farthest, pick = nearest[j], j
    return chosen
