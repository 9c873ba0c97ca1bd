"""The links of an index: edges, entry points, and chains of equal rows.

Functions here build them, extend them by new rows, and reduce them to live rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from workers.vector.graph import duplicates, entry_points, linking
from workers.vector.graph.versions import GraphVersion, GraphVersions
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.keys import NOWHERE

_NO_ROWS: Array = np.empty(0, np.int64)


class GraphLinks(NamedTuple):
    """Edges, entry points and duplicates of the linked rows."""

    graph: Array  # uint32 (rows, degree)
    entries: Array  # int64, ascending
    chain: Array | None  # uint32 (rows, 1), see `duplicates.py`
    versions: tuple[GraphVersion, ...]  # of the graph, then of the chain

    @classmethod
    def first(cls, graph: Array, entries: Array, chain: Array | None) -> "GraphLinks":
        """Make links of arrays that come from no earlier ones."""
        arrays = (graph,) if chain is None else (graph, chain)
        return cls(graph, entries, chain, tuple(GraphVersion(array) for array in arrays))


class LinkHistory:
    """The versions of an index's links; the writer of the next holds the index's locks."""

    def __init__(self, links: GraphLinks) -> None:
        of_graph, *of_chain = links.versions
        self.graphs, self.entries = GraphVersions(of_graph), links.entries
        self.chains = GraphVersions(of_chain[0]) if of_chain else None
        self._notes: linking.EdgeNotes | None = None
        self._open_notes: linking.EdgeNotes | None = None

    @property
    def newest(self) -> GraphLinks:
        """Return the links that were published last."""
        graph = self.graphs.newest
        if self.chains is None:
            return GraphLinks(graph.array, self.entries, None, (graph,))
        chain = self.chains.newest
        return GraphLinks(graph.array, self.entries, chain.array, (graph, chain))

    @property
    def bytes_held(self) -> int:
        """Return the memory of graphs, chains and notes, with room for more rows."""
        chains = self.chains.bytes_held if self.chains else 0
        notes = sum(array.nbytes for array in self._open_notes or ())
        return self.graphs.bytes_held + chains + notes

    def notes(self, rows: int) -> linking.EdgeNotes:
        """Return the notes of the edges of at least `rows` rows, for `linking` to change.

        `publish` takes them back. If the links are never published, the notes are wrong, and the
        next call makes new ones.
        """
        edge_notes, self._notes = self._notes, None
        linked, degree = self.graphs.newest.array.shape
        if edge_notes is None or len(edge_notes.lengths) < rows:
            new_notes = linking.unknown_notes(rows + rows // 2, degree)
            if edge_notes is not None:
                for new, old in zip(new_notes, edge_notes, strict=True):
                    new[:linked] = old[:linked]
            edge_notes = new_notes
        self._open_notes = edge_notes
        return edge_notes

    def publish(self, links: GraphLinks) -> None:
        """Make links of `extend_links` or `with_edges_to` the newest."""
        self._notes = self._open_notes
        of_graph, *of_chain = links.versions
        self.graphs.publish(of_graph)
        self.entries = links.entries
        if self.chains is not None:
            self.chains.publish(of_chain[0])
        elif of_chain:
            self.chains = GraphVersions(of_chain[0])


def entries_of(
    vectors: Array, graph: Array, chain: Array | None, metric: int, stored: int, *, seed: int
) -> Array:
    """Choose entry points for a graph from its nodes."""
    nodes = duplicates.nodes(chain, len(graph))
    return entry_points.representatives(vectors, graph, nodes, metric, stored, seed=seed)


def no_links(degree: int) -> GraphLinks:
    """Make the links of an index without rows."""
    return GraphLinks.first(np.empty((0, degree), np.uint32), _NO_ROWS, None)


def build_links(
    vectors: Array, degree: int, metric: int, stored: int, graph_of: Callable[[Array], Array], *,
    seed: int,
) -> GraphLinks:  # fmt: skip
    """Build the links of all `vectors`; `graph_of` makes the graph of distinct ones."""
    if not len(vectors):
        return no_links(degree)
    graph, chain = duplicates.over_nodes(vectors, metric, graph_of)
    return GraphLinks.first(
        graph, entries_of(vectors, graph, chain, metric, stored, seed=seed), chain
    )


def extend_links(
    history: LinkHistory, vectors: Array, nearest_nodes: Callable[[Array], Array], metric: int,
    stored: int, *, threads: int,
) -> GraphLinks:  # fmt: skip
    """Make the next links, with the rows of `vectors` that were not linked yet.

    `nearest_nodes` takes some of these, int64, and returns the nodes that are nearest to each,
    int64 (rows, list length), -1 at the end of short lists.
    """
    first, last = len(history.graphs.newest.array), len(vectors)
    node_of = first + duplicates.first_equal(vectors[first:], metric)
    new_rows = np.arange(first, last)
    distinct = new_rows[node_of == new_rows]
    nearest = nearest_nodes(distinct)
    equal_rows = duplicates.match_equal_rows(vectors, distinct, nearest, metric)
    node_of[distinct[equal_rows >= 0] - first] = equal_rows[equal_rows >= 0]
    node_of = np.where(node_of < first, node_of, node_of[np.maximum(node_of - first, 0)])
    new, copy_rows = distinct[equal_rows < 0], new_rows[node_of != new_rows]
    graph = history.graphs.begin(last)
    changed = linking.link_rows(
        graph, history.notes(last), first, new, vectors, nearest[equal_rows < 0], metric, stored,
        threads=threads,
    )  # fmt: skip
    graph[copy_rows] = node_of[copy_rows - first, None]
    entries = entry_points.extend(history.entries, first, new, vectors, graph, metric, stored)
    of_graph = history.graphs.seal(changed)
    if history.chains is None and not len(copy_rows):
        return GraphLinks(graph, entries, None, (of_graph,))
    if history.chains is None:
        chain = duplicates.empty_chain(last)
        duplicates.append(chain, copy_rows, node_of)
        return GraphLinks(graph, entries, chain, (of_graph, GraphVersion(chain)))
    chain = history.chains.begin(last)
    chain[first:] = NOWHERE
    after = duplicates.append(chain, copy_rows, node_of)
    return GraphLinks(graph, entries, chain, (of_graph, history.chains.seal(after[after < first])))


def with_edges_to(
    history: LinkHistory, vectors: Array, rows: Array, nearest: Array, metric: int, stored: int
) -> GraphLinks:
    """Make the next links, with edges to `rows`, int64, from the nodes nearest to each.

    These are `nearest`, int64 (rows, list length), -1 at the end of short lists.
    """
    before = history.newest
    linked = len(before.graph)
    graph = history.graphs.begin(linked)
    changed = linking.add_edges_to(
        graph, history.notes(linked), rows, nearest, vectors, metric, stored
    )
    versions = [history.graphs.seal(changed)]
    if history.chains is not None:
        history.chains.begin(linked)
        versions.append(history.chains.seal(_NO_ROWS))
    chain = None if history.chains is None else versions[1].array
    return GraphLinks(graph, before.entries, chain, tuple(versions))


def compact_links(
    links: GraphLinks, vectors: Array, live: Array, metric: int, stored: int, *, threads: int
) -> tuple[Array, Array | None]:
    """Return the graph and chain of the live rows only, renumbered in their order; `live` is
    int64, ascending."""
    heads = None if links.chain is None else duplicates.heads(links.chain)[live]
    graph = linking.drop_deleted(
        links.graph, vectors, live, metric, stored, heads=heads, threads=threads
    )  # fmt: skip
    if heads is None:
        return graph, None
    _, heirs, heir_of = np.unique(heads, return_index=True, return_inverse=True)
    return graph, duplicates.chain_of(heirs[heir_of])
