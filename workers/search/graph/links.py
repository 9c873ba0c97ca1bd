"""All that a walk needs of the linked rows: edges, entry points, and which rows are copies.

Made from nothing, for rows that came, and for rows that are left.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from workers.search.graph import copies, entry_points, linking
from workers.search.graph.versions import Version, Versions
from workers.search.kernels.arrays import Array
from workers.search.kernels.keys import NOWHERE

_NO_ROWS: Array = np.empty(0, np.int64)


class Links(NamedTuple):
    """Of the linked rows."""

    graph: Array  # uint32 (rows, degree)
    entries: Array  # int64, ascending
    chain: Array | None  # uint32 (rows, 1), see `copies.py`
    versions: tuple[Version, ...]  # of the graph, then of the chain

    @classmethod
    def first(cls, graph: Array, entries: Array, chain: Array | None) -> "Links":
        """Of arrays that come from no earlier ones."""
        arrays = (graph,) if chain is None else (graph, chain)
        return cls(graph, entries, chain, tuple(Version(array) for array in arrays))


class Kept:
    """The versions of an index's links; who writes the next holds the index's locks."""

    def __init__(self, links: Links) -> None:
        of_graph, *of_chain = links.versions
        self.graphs, self.entries = Versions(of_graph), links.entries
        self.chains = Versions(of_chain[0]) if of_chain else None
        self._notes: linking.EdgeNotes | None = None
        self._lent: linking.EdgeNotes | None = None

    @property
    def newest(self) -> Links:
        """What was published last."""
        graph = self.graphs.newest
        if self.chains is None:
            return Links(graph.array, self.entries, None, (graph,))
        chain = self.chains.newest
        return Links(graph.array, self.entries, chain.array, (graph, chain))

    @property
    def bytes_held(self) -> int:
        """Of graphs and chains, with room for more rows."""
        chains = self.chains.bytes_held if self.chains else 0
        notes = sum(each.nbytes for each in self._lent or ())
        return self.graphs.bytes_held + chains + notes

    def notes(self, rows: int) -> linking.EdgeNotes:
        """Of the edges of at least so many rows, to be changed (`linking.extended`).

        They are given back with `publish`; what is never published would be wrong, and they are
        made anew then.
        """
        held, self._notes = self._notes, None
        linked, degree = self.graphs.newest.array.shape
        if held is None or len(held.lengths) < rows:
            room = linking.unknown(rows + rows // 2, degree)
            if held is not None:
                for new, old in zip(room, held, strict=True):
                    new[:linked] = old[:linked]
            held = room
        self._lent = held
        return held

    def publish(self, links: Links) -> None:
        """What `extended` made is the newest."""
        self._notes = self._lent
        of_graph, *of_chain = links.versions
        self.graphs.publish(of_graph)
        self.entries = links.entries
        if self.chains is not None:
            self.chains.publish(of_chain[0])
        elif of_chain:
            self.chains = Versions(of_chain[0])


def entries_of(
    vectors: Array, graph: Array, chain: Array | None, metric: int, stored: int, *, seed: int
) -> Array:
    """Entry points, chosen anew."""
    nodes = copies.nodes(chain, len(graph))
    return entry_points.representatives(vectors, graph, nodes, metric, stored, seed=seed)


def none(degree: int) -> Links:
    """Of no rows."""
    return Links.first(np.empty((0, degree), np.uint32), _NO_ROWS, None)


def built(
    vectors: Array, degree: int, metric: int, stored: int, graph_of: Callable[[Array], Array], *,
    seed: int,
) -> Links:  # fmt: skip
    """Of all `vectors`; `graph_of` makes the graph of distinct ones."""
    if not len(vectors):
        return none(degree)
    graph, chain = copies.over_nodes(vectors, metric, graph_of)
    return Links.first(graph, entries_of(vectors, graph, chain, metric, stored, seed=seed), chain)


def extended(
    kept: Kept, vectors: Array, found_for: Callable[[Array], Array], metric: int, stored: int, *,
    threads: int,
) -> Links:  # fmt: skip
    """With the rows of `vectors` that were not linked yet.

    `found_for` takes some of these, int64, and returns the nodes that are nearest to each, int64
    (rows, list length), -1 at the end of short lists.
    """
    first, last = len(kept.graphs.newest.array), len(vectors)
    node_of = first + copies.firsts(vectors[first:], metric)
    came = np.arange(first, last)
    distinct = came[node_of == came]
    found = found_for(distinct)
    known = copies.matched(vectors, distinct, found, metric)
    node_of[distinct[known >= 0] - first] = known[known >= 0]
    node_of = np.where(node_of < first, node_of, node_of[np.maximum(node_of - first, 0)])
    new, same = distinct[known < 0], came[node_of != came]
    graph = kept.graphs.begun(last)
    changed = linking.extended(
        graph, kept.notes(last), first, new, vectors, found[known < 0], metric, stored,
        threads=threads,
    )  # fmt: skip
    graph[same] = node_of[same - first, None]
    entries = entry_points.extended(kept.entries, first, new, vectors, graph, metric, stored)
    of_graph = kept.graphs.written(changed)
    if kept.chains is None and not len(same):
        return Links(graph, entries, None, (of_graph,))
    if kept.chains is None:
        chain = copies.unchained(last)
        copies.append(chain, same, node_of)
        return Links(graph, entries, chain, (of_graph, Version(chain)))
    chain = kept.chains.begun(last)
    chain[first:] = NOWHERE
    after = copies.append(chain, same, node_of)
    return Links(graph, entries, chain, (of_graph, kept.chains.written(after[after < first])))


def led_back(
    kept: Kept, vectors: Array, rows: Array, found: Array, metric: int, stored: int
) -> Links:
    """With edges to `rows`, int64, from the nodes that are nearest to each.

    These are `found`, int64 (rows, list length), -1 at the end of short lists.
    """
    before = kept.newest
    linked = len(before.graph)
    graph = kept.graphs.begun(linked)
    changed = linking.led_back(graph, kept.notes(linked), rows, found, vectors, metric, stored)
    versions = [kept.graphs.written(changed)]
    if kept.chains is not None:
        kept.chains.begun(linked)
        versions.append(kept.chains.written(_NO_ROWS))
    chain = None if kept.chains is None else versions[1].array
    return Links(graph, before.entries, chain, tuple(versions))


def compacted(
    links: Links, vectors: Array, live: Array, metric: int, stored: int, *, threads: int
) -> tuple[Array, Array | None]:
    """Graph and chain of the live rows alone, renumbered in their order; `live` is int64,
    ascending."""
    heads = None if links.chain is None else copies.heads(links.chain)[live]
    graph = linking.mended(
        links.graph, vectors, live, metric, stored, heads=heads, threads=threads
    )  # fmt: skip
    if heads is None:
        return graph, None
    _, heirs, of = np.unique(heads, return_index=True, return_inverse=True)
    return graph, copies.chained(heirs[of])
