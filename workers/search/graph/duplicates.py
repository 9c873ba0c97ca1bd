"""Rows with equal vectors: the first is a node of the graph, the others are its copies.

As nodes, copies would fill each other's lists of neighbours and lead nowhere new. So nobody has an
edge to a copy, and all of its edges lead to its node. Some rows that rounding has moved apart
count as equal, too (`near_duplicates.py`); a copy is as far as its node. A *chain* leads from a
node to its copies, in ascending order: for each row the next one, NOWHERE at the end. It has the
shape of a graph with one edge, uint32 (rows, 1), so that it grows as one does (`versions.py`).
Where no two rows are known to be equal there is no chain, None.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from workers.search.graph import near_duplicates
from workers.search.kernels.arrays import Array, gather_rows
from workers.search.kernels.jit import kernel
from workers.search.kernels.keys import NOWHERE

_SCATTER, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


def over_nodes(
    vectors: Array, metric: int, graph_of: Callable[[Array], Array]
) -> tuple[Array, Array | None]:
    """The graph of all vectors, made by `graph_of` for distinct ones, and the chain."""
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
    """Of each row the first one that is equal: shape (rows,), int64."""
    words = _words(vectors)
    hashes = _hash_rows(words)
    node_of = _first_of_runs(words, hashes, np.argsort(hashes, kind="stable"))
    if near_duplicates.are_merged(vectors, metric):
        nodes = np.flatnonzero(node_of == np.arange(len(node_of)))
        node_of[nodes] = near_duplicates.first_equal(vectors, nodes)
        node_of = node_of[node_of]
    return node_of


def chain_of(node_of: Array) -> Array | None:
    """The chain of rows whose nodes are `node_of`, int64 (rows,)."""
    if (node_of == np.arange(len(node_of))).all():
        return None
    chain = empty_chain(len(node_of))
    append(chain, np.flatnonzero(node_of != np.arange(len(node_of))), node_of)
    return chain


def empty_chain(rows: int) -> Array:
    """The chain of rows that have no copies."""
    return np.full((rows, 1), NOWHERE, np.uint32)


def append(chain: Array, rows: Array, node_of: Array) -> Array:
    """Add ascending `rows` to the chains of their nodes; who they come after, ascending.

    In place. `node_of` is int64: of rows, by their number counted from the end of the chain.
    """
    first = len(chain) - len(node_of)
    order = rows[np.argsort(node_of[rows - first], kind="stable")]
    after: Array = np.sort(_append(chain, order, node_of, first))
    return after


def node_count(chain: Array | None, rows: int) -> int:
    """How many of so many rows are nodes: all but those that a chain leads to."""
    return rows if chain is None else rows - int(np.count_nonzero(chain != NOWHERE))


def nodes(chain: Array | None, rows: int) -> Array:
    """Rows that are nodes, of so many: ascending, int64."""
    all_rows = np.arange(rows)
    node_rows: Array = all_rows if chain is None else all_rows[heads(chain) == all_rows]
    return node_rows


def are_lone(chain: Array) -> Array:
    """Whether a row has no equal one: bool (rows,)."""
    lone: Array = (chain[:, 0] == NOWHERE) & (heads(chain) == np.arange(len(chain)))
    return lone


def match_equal_rows(vectors: Array, rows: Array, candidates: Array, metric: int) -> Array:
    """Of each of `rows` the first row found for it that is equal: int64, -1 for none.

    `found` is int64 (rows, list length), -1 at the end of short lists.
    """
    if near_duplicates.are_merged(vectors, metric):
        return near_duplicates.match_equal_rows(vectors, rows, candidates)
    return _match_words(_words(vectors), rows, candidates)


def _words(vectors: Array) -> Array:
    return vectors.view(np.uint64)


@kernel
def heads(chain: Array) -> Array:
    """The node of each row, int64 (rows,)."""
    out = np.arange(len(chain))
    for row in range(len(chain)):
        if chain[row, 0] != NOWHERE:
            out[chain[row, 0]] = out[row]
    return out


@kernel
def _append(chain: Array, rows: Array, node_of: Array, first: int) -> Array:
    """`append` of rows in the order of their nodes."""
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
    """Of each row of uint64 words one word, uint64 (rows,)."""
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
    """The first of each run of equal rows in `order`, int64, by hash and then by number."""
    out = np.empty(len(words), np.int64)
    lead = np.int64(-1)
    for row in order:
        if lead < 0 or hashes[row] != hashes[lead] or not _equal(words, row, lead):
            lead = row
        out[row] = lead
    return out


@kernel
def _match_words(words: Array, rows: Array, candidates: Array) -> Array:
    """`matched` of vectors as words."""
    out = np.full(len(rows), -1, np.int64)
    for i in range(len(rows)):
        for candidate in candidates[i]:
            if candidate >= 0 and _equal(words, rows[i], candidate):
                out[i] = candidate
                break
    return out


@kernel
def _equal(words: Array, first: Any, second: Any) -> bool:
    """Whether two rows have the same words."""
    for i in range(words.shape[1]):  # most differ in the first
        if words[first, i] != words[second, i]:
            return False
    return True
