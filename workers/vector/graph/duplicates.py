"""Finds rows with equal vectors: the first is a node of the graph, the others are its copies.

As nodes, copies would fill each other's lists of neighbours and lead nowhere new. So no row has an
edge to a copy, and all edges of a copy lead to its node. Some rows that differ only by rounding
count as equal, too (`near_duplicates.py`); a copy gets its node's distance. A *chain* leads from a
node to its copies, in ascending order: for each row the next one, NOWHERE at the end. It has the
shape of a graph of degree one, uint32 (rows, 1), so that it grows like one (`versions.py`). If no
two rows are known to be equal, the chain is None.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from workers.vector.graph import near_duplicates
from workers.vector.kernels.arrays import Array, gather_rows
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import NOWHERE

_SCATTER, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


def over_nodes(
    vectors: Array, metric: int, graph_of: Callable[[Array], Array]
) -> tuple[Array, Array | None]:
    """Return the graph of all vectors, and the chain; `graph_of` makes that of distinct ones."""
    node_of = first_equal(vectors, metric)
    chain = chain_of(node_of)
    if chain is None:
        return graph_of(vectors), None
    nodes = np.flatnonzero(node_of == np.arange(len(vectors)))
    node_graph = graph_of(gather_rows(vectors, nodes))
    graph = np.empty((len(vectors), node_graph.shape[1]), np.uint32)
    graph[:] = node_of[:, None]
    graph[nodes] = nodes[node_graph]
    return graph, chain


def first_equal(vectors: Array, metric: int) -> Array:
    """Return for each row the first one that is equal: int64 (rows,)."""
    words = _words(vectors)
    hashes = _hash_rows(words)
    node_of = _first_of_runs(words, hashes, np.argsort(hashes, kind="stable"))
    if near_duplicates.are_merged(vectors, metric):
        nodes = np.flatnonzero(node_of == np.arange(len(node_of)))
        node_of[nodes] = near_duplicates.first_equal(vectors, nodes)
        node_of = node_of[node_of]
    return node_of


def chain_of(node_of: Array) -> Array | None:
    """Make the chain of rows whose nodes are `node_of`, int64 (rows,); None without copies."""
    if (node_of == np.arange(len(node_of))).all():
        return None
    chain = empty_chain(len(node_of))
    append(chain, np.flatnonzero(node_of != np.arange(len(node_of))), node_of)
    return chain


def empty_chain(rows: int) -> Array:
    """Make the chain of rows that have no copies."""
    return np.full((rows, 1), NOWHERE, np.uint32)


def append(chain: Array, rows: Array, node_of: Array) -> Array:
    """Add ascending `rows` to the chains of their nodes, in place; return the rows before them.

    These are ascending. `node_of`, int64, has the nodes of the last rows of the chain.
    """
    first = len(chain) - len(node_of)
    order = rows[np.argsort(node_of[rows - first], kind="stable")]
    after: Array = np.sort(_append(chain, order, node_of, first))
    return after


def node_count(chain: Array | None, rows: int) -> int:
    """Return how many of `rows` rows are nodes: all except those that a chain leads to."""
    return rows if chain is None else rows - int(np.count_nonzero(chain != NOWHERE))


def nodes(chain: Array | None, rows: int) -> Array:
    """Return the nodes among the first `rows` rows: ascending, int64."""
    all_rows = np.arange(rows)
    node_rows: Array = all_rows if chain is None else all_rows[heads(chain) == all_rows]
    return node_rows


def are_lone(chain: Array) -> Array:
    """Return for each row whether it has no equal one: bool (rows,)."""
    lone: Array = (chain[:, 0] == NOWHERE) & (heads(chain) == np.arange(len(chain)))
    return lone


def match_equal_rows(vectors: Array, rows: Array, candidates: Array, metric: int) -> Array:
    """Return for each of `rows` its first candidate that is equal: int64, -1 for none.

    `candidates` is int64 (rows, list length), -1 at the end of short lists.
    """
    if near_duplicates.are_merged(vectors, metric):
        return near_duplicates.match_equal_rows(vectors, rows, candidates)
    return _match_words(_words(vectors), rows, candidates)


def _words(vectors: Array) -> Array:
    return vectors.view(np.uint64)


@kernel
def heads(chain: Array) -> Array:
    """Return the node of each row, int64 (rows,)."""
    out = np.arange(len(chain))
    for row in range(len(chain)):
        if chain[row, 0] != NOWHERE:
            out[chain[row, 0]] = out[row]
    return out


@kernel
def _append(chain: Array, rows: Array, node_of: Array, first: int) -> Array:
    """Append rows, which are in the order of their nodes, to the chains."""
    after = np.empty(len(rows), np.int64)
    node = last = np.int64(-1)
    for i in range(len(rows)):
        if node_of[rows[i] - first] != node:
            node = last = node_of[rows[i] - first]
            while chain[last, 0] != NOWHERE:
                last = np.int64(chain[last, 0])
        chain[last, 0] = rows[i]
        after[i] = last
        last = rows[i]
    return after


@kernel
def _hash_rows(words: Array) -> Array:
    """Return a hash of each row of uint64 words, uint64 (rows,)."""
    out = np.empty(len(words), np.uint64)
    for row in range(len(words)):
        mixed = np.uint64(0)
        for word in words[row]:
            mixed = (mixed ^ word) * _SCATTER
            mixed ^= mixed >> _HALF
        out[row] = mixed
    return out


@kernel
def _first_of_runs(words: Array, hashes: Array, order: Array) -> Array:
    """Return for each row the first of its run of equal rows in `order`, int64.

    `order` is by hash and then by number."""
    out = np.empty(len(words), np.int64)
    lead = np.int64(-1)
    for row in order:
        if lead < 0 or hashes[row] != hashes[lead] or not _equal(words, row, lead):
            lead = row
        out[row] = lead
    return out


@kernel
def _match_words(words: Array, rows: Array, candidates: Array) -> Array:
    """Do the work of `match_equal_rows` for vectors as words."""
    out = np.full(len(rows), -1, np.int64)
    for i in range(len(rows)):
        for candidate in candidates[i]:
            if candidate >= 0 and _equal(words, rows[i], candidate):
                out[i] = candidate
                break
    return out


@kernel
def _equal(words: Array, first: Any, second: Any) -> bool:
    """Return whether two rows have the same words."""
    for i in range(words.shape[1]):  # most rows differ in the first word
        if words[first, i] != words[second, i]:
            return False
    return True
