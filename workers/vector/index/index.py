"""An index: rows, the graph over the linked rows, and the views that searches read.

Upserts and deletes are visible in the next `view` at once: rows without edges are scanned, deleted
rows are walked through but not returned. `link` gives edges to some of the new rows and `compact`
drops the deleted ones. Both may run on another thread, one at a time, while searches and changes
continue.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest, WrongDimension
from schemas.rules.metadata import Metadata
from workers.vector.filters import parts
from workers.vector.filters.columns import ColumnStore
from workers.vector.graph import density, entry_points, links
from workers.vector.graph.build import GraphOf, own_graph
from workers.vector.index import bulk, inputs, plans
from workers.vector.index.audit import MANY, Neighbours, audit_index, find_lost, find_missed
from workers.vector.index.query import Effort, ExternalId
from workers.vector.index.rows import Rows, check_ids
from workers.vector.index.view import IndexAudit, IndexView
from workers.vector.kernels import codes
from workers.vector.kernels.arrays import Array, gather_rows
from workers.vector.kernels.metrics import Metric, Storage
from workers.vector.limits import CANDIDATES, DEGREE, DEGREE_MAX

LINK_BATCH = 512  # rows that are linked together; each is compared with all others of them
_LINK_TOP_M = 48  # 64 adds 0.006 recall at 64 entries, none at 128, and takes 8 us a row more
_ENTRIES_GROWN = 2  # times the entry points of the last audit, at which all are chosen again

LinkResult = tuple[
    links.GraphLinks, codes.Codes | None, IndexAudit
]  # new links, codes of their rows, and the audit of both


class Index:
    """Vectors of one dimension and metric, with ids and metadata."""

    def __init__(
        self, dim: int, *, metric: Metric = Metric.SQEUCLIDEAN,
        storage: Storage = Storage.FLOAT32, degree: int = DEGREE, seed: int = 0, threads: int = 0,
        graph_of: GraphOf = own_graph,
    ) -> None:  # fmt: skip
        if dim < 1 or not 2 <= degree <= DEGREE_MAX:
            raise InvalidRequest(
                f"expected dim >= 1 and degree from 2 to {DEGREE_MAX}, found {dim} and {degree}"
            )
        self.dim, self.metric, self.storage = dim, metric, storage
        self.degree, self.seed, self.threads = degree, seed, threads
        self.graph_of = graph_of  # used by builds; later rows are linked on cores
        self.epoch = 0
        empty = inputs.prepare(np.empty((0, dim), np.float32), dim, metric, storage)
        self.rows = Rows(empty, [], ColumnStore())
        self.links = links.LinkHistory(links.no_links(degree))
        self.codes: codes.Codes | None = None  # of the rows that have edges
        self.audit: IndexAudit | None = None
        self._relinked_rows = 0  # rows that `relink_lost` has searched for
        self._relink_audit: IndexAudit | None = None  # of the last complete pass of `relink_lost`
        self._view: IndexView | None = None
        self._lock = Lock()  # guards rows, links, codes, audit and view
        self._upkeep = Lock()  # held by link, relink_lost and compact

    @classmethod
    def build(
        cls, vectors: Any, ids: Sequence[ExternalId] | None = None,
        metadata: Sequence[Metadata] | None = None, **settings: Any,
    ) -> "Index":  # fmt: skip
        """Build an index of `vectors`, (count, dim), all linked; by default ids are row numbers.

        Raises WrongDimension, InvalidVector and InvalidRequest."""
        matrix = inputs.to_float32(vectors)
        if matrix.ndim != 2:
            raise WrongDimension(f"expected vectors in rows, found shape {matrix.shape}")
        index = cls(matrix.shape[1], **settings)
        index.upsert(range(len(matrix)) if ids is None else ids, matrix, metadata)
        index.link()
        return index

    def __len__(self) -> int:
        return self.rows.count - self.rows.dead_count

    @property
    def graph(self) -> Array:
        """Return the edges of the linked rows, uint32 (linked rows, degree)."""
        return self.links.graphs.newest.array

    @property
    def entries(self) -> Array:
        """Return the rows where searches begin, int64."""
        return self.links.entries

    @property
    def loose(self) -> int:
        """Return the number of rows without edges, which searches scan."""
        return self.rows.count - len(self.graph)

    @property
    def dead_share(self) -> float:
        """Return the share of rows that are deleted and not compacted yet."""
        return self.rows.dead_count / max(1, self.rows.count)

    @property
    def bytes_held(self) -> int:
        """Return the bytes of arrays, spare capacity included, and payloads, without ids."""
        coded = self.codes.bytes_held if self.codes else 0
        return self.rows.bytes_held + self.links.bytes_held + coded

    def upsert(
        self, ids: Sequence[ExternalId], vectors: Any,
        metadata: Sequence[Metadata] | None = None,
        payloads: Sequence[bytes] | None = None, deleted_ids: Sequence[ExternalId] = (),
    ) -> None:  # fmt: skip
        """Add rows and replace those with the same ids; on an error nothing changes.

        A payload is the caller's data of a row. The rows of `deleted_ids` are deleted in the same
        step: a view has either these or the new rows. Raises WrongDimension, InvalidVector and
        InvalidRequest.
        """
        stored = inputs.prepare(vectors, self.dim, self.metric, self.storage)
        check_ids(ids, len(stored))
        row_metadata = [{}] * len(stored) if metadata is None else metadata
        if len(row_metadata) != len(stored):
            raise InvalidRequest(
                f"expected {len(stored)} metadata, found {len(row_metadata)}", "metadata"
            )
        assert payloads is None or len(payloads) == len(stored), "a payload for each row"
        with self._lock:
            columns = self.rows.columns_for(row_metadata, [*ids, *deleted_ids])
            columns.check(row_metadata)
            self.rows.set_columns(columns)
            for external in deleted_ids:
                self.rows.delete(external)
            self.rows.append(stored, ids, row_metadata, payloads)
            self._publish_view()

    def delete(self, ids: Sequence[ExternalId]) -> int:
        """Delete rows; return how many existed."""
        with self._lock:
            deleted = sum([self.rows.delete(external) for external in ids])
            self._publish_view()
        return deleted

    def view(self) -> IndexView:
        """Return the index's present state; never waits for a change in progress."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def search(self, queries: Any, effort: Effort | None = None) -> tuple[Array, Array]:
        """Return rows and distances of the nearest to each query, shapes (queries, k).

        Blocks, on all cores; `SearchEngine` is for single queries. Places beyond the last hit have
        row -1 at infinity. `ids_of` returns the ids of rows. Raises what `plans.plan_search` and
        `inputs.prepare` raise.
        """
        view, effort = self.view(), effort or Effort()
        plans.plan_search(effort, view)  # raises
        prepared = inputs.prepare(queries, self.dim, self.metric)
        hits = bulk.search_all(effort, prepared, view, threads=self.threads)
        return hits.rows, self.metric.to_user_distances(hits.distances)

    def missed_share(self) -> float:
        """Search for a sample of rows, and return the share that nothing as near was found for."""
        view = self.view()
        return find_missed(view, self.neighbours, np.random.default_rng(self.seed))[1]

    def ids_of(self, rows: Array) -> list[ExternalId]:
        """Return the external ids of rows of the present view."""
        ids = self.view().ids
        return [ids[row] for row in rows.tolist()]

    def link(self, batch: int = LINK_BATCH, neighbours: Neighbours | None = None) -> int:
        """Give edges to the first `batch` rows that lack them; return how many still lack them.

        If more than half as many rows lack edges as have them, all rows get a new graph. Otherwise
        `neighbours` finds the new rows' neighbours, for example `SearchEngine.neighbours`; the
        default searches here, on all threads. Its errors are raised, and nothing changes.
        """
        with self._upkeep:
            view = self.view()
            loose = view.count - view.linked
            if loose == 0:
                return 0
            neighbours = neighbours or self.neighbours
            is_new = loose > view.linked // 2
            if is_new:
                new_links, coded, audit = self._build_links(view, view.count, neighbours)
            else:
                new_links, coded, audit = self._grow_links(
                    view, view.linked + min(loose, batch), neighbours
                )
            with self._lock:
                if is_new:
                    self.links = links.LinkHistory(new_links)
                else:
                    self.links.publish(new_links)
                self.codes, self.audit = coded, audit
                self._publish_view()
                return self.loose

    def relink_lost(self, batch: int = LINK_BATCH, neighbours: Neighbours | None = None) -> bool:
        """Search for the next `batch` linked rows, and add edges to those that are not found;
        return whether more rows remain.

        One pass over all rows follows each audit that missed more than `audit.MANY`; the audit then
        gets the share that is still missed. `neighbours` is that of `link`.
        """
        with self._upkeep:
            view, audit = self.view(), self.audit
            if audit is None or audit is self._relink_audit or audit.missed_share <= MANY:
                return False
            neighbours = neighbours or self.neighbours
            first = self._relinked_rows if self._relinked_rows < view.linked else 0
            last = min(view.linked, first + batch)
            new_links = self._link_lost_rows(view, first, last, neighbours)
            if is_over := last == view.linked:
                linked = view.linked_part(new_links or view.links, view.codes)
                now = replace(linked, alive=view.alive, is_walked=True).ready(view)
                share = find_missed(now, neighbours, np.random.default_rng(self.seed))[1]
                audit = self._relink_audit = replace(audit, missed_share=share)
            with self._lock:
                if new_links is not None:
                    self.links.publish(new_links)
                self._relinked_rows, self.audit = 0 if is_over else last, audit
                self._publish_view()
            return not is_over

    def compact(self) -> None:
        """Drop the deleted rows: renumber the others, and repair the graph."""
        with self._upkeep:
            view = self.view()
            live = view.live_rows()
            linked = live[live < view.linked]
            vectors = gather_rows(view.vectors, live)
            now = replace(view, vectors=vectors)
            if len(linked) < view.linked // 2:
                new_links, coded, audit = self._build_links(now, len(linked), self.neighbours)
            else:
                kernel = (self.metric.number, self.storage.number)
                graph, chain = links.compact_links(
                    view.links, view.vectors, linked, *kernel, threads=self.threads
                )
                entries = self._entries(vectors[: len(linked)], graph, chain)
                coded = codes.encode_rows(vectors[: len(linked)], kernel[0], threads=self.threads)
                new_links, audit = self._audit_links(
                    now, links.GraphLinks.first(graph, entries, chain), coded, self.neighbours
                )
            old = self.rows.large_objects()
            with self._lock:
                self._replace(view, live, vectors)
                self.links = links.LinkHistory(new_links)
                self.codes, self.audit = coded, audit
                self._publish_view()
            del view, now
            parts.release_gradually(old)

    def _replace(self, view: IndexView, live: Array, vectors: Array) -> None:
        """Install the compacted rows, then apply the upserts and deletes since `view`."""
        old = self.rows
        row_of = old.row_of
        late_rows = np.arange(view.count, old.count)
        ids, payloads = parts.take(old.ids, live), parts.take(old.payloads, live)
        columns = old.columns.take(np.concatenate([live, late_rows]))
        rows = Rows(vectors, ids, columns, payloads=payloads)
        deleted_names = []
        for first, last in parts.in_parts(len(live)):
            names = zip(live[first:last].tolist(), ids[first:last], strict=True)
            deleted_names += [name for row, name in names if row_of.get(name) != row]
        for name in deleted_names:
            rows.delete(name)
        late_ids = old.ids[view.count :]
        if len(late_rows):
            metadata: list[Metadata] = [{}] * len(late_rows)
            rows.append(old.vectors[late_rows], late_ids, metadata, old.payloads[view.count :])
        for name in late_ids:
            if name not in row_of:
                rows.delete(name)
        self.rows = rows

    def _build_links(self, view: IndexView, count: int, neighbours: Neighbours) -> LinkResult:
        """Build links of the first `count` rows of a view.

        Edges are left out if few are needed. By inner product the edges' lengths cannot show that,
        so both graphs are tested with rows that are held out.
        """
        vectors, kernel = view.vectors[:count], (self.metric.number, self.storage.number)
        options = {"seed": self.seed, "threads": self.threads}
        coded = codes.encode_rows(vectors, kernel[0], threads=self.threads)
        with_few: Array | None = None

        def graph_of(distinct: Array) -> Array:
            nonlocal with_few
            graph = self.graph_of(distinct, self.degree, *kernel, **options)
            few = density.thin_edges(graph, distinct, kernel[1], threads=self.threads)
            if few is graph:
                return graph
            with_few = density.add_levels(few, distinct, kernel[1], **options)
            return graph if self.metric is Metric.INNER_PRODUCT else with_few

        def linked(graph_of: Callable[[Array], Array]) -> tuple[links.GraphLinks, IndexAudit]:
            new_links = links.build_links(vectors, self.degree, *kernel, graph_of, seed=self.seed)
            return self._audit_links(view, new_links, coded, neighbours)

        new_links, audit = linked(graph_of)
        if self.metric is Metric.INNER_PRODUCT and with_few is not None:
            few, audit_of_few = linked(lambda _: with_few)
            if audit_of_few.serves_as_well_as(audit):
                return few, coded, audit_of_few
        return new_links, coded, audit

    def _grow_links(self, view: IndexView, last: int, neighbours: Neighbours) -> LinkResult:
        """Extend the links of a view to its first `last` rows."""
        before = self.audit
        new_links = self._link_rows(view, last, neighbours)
        if before is None or len(new_links.entries) > _ENTRIES_GROWN * before.entries:
            entries = self._entries(view.vectors[:last], new_links.graph, new_links.chain)
            new_links, before = new_links._replace(entries=entries), None
        elif before.is_old(last):
            entries = entry_points.cover_components(new_links.entries, new_links.graph)
            new_links = new_links._replace(entries=entries)
        coded = codes.extend(
            view.codes, view.vectors[:last], self.metric.number, threads=self.threads
        )
        if before is None or before.is_old(last):
            new_links, before = self._audit_links(view, new_links, coded, neighbours, before)
        return new_links, coded, before

    def _audit_links(
        self, view: IndexView, new_links: links.GraphLinks, coded: codes.Codes | None,
        neighbours: Neighbours, before: IndexAudit | None = None,
    ) -> tuple[links.GraphLinks, IndexAudit]:  # fmt: skip
        """Audit links of a view's first rows, and add the entry points that searches need."""
        now = view.linked_part(new_links, coded)
        entries, audit = audit_index(
            now, neighbours, seed=self.seed, before=before, threads=self.threads
        )
        return new_links._replace(entries=entries), audit

    def _entries(self, vectors: Array, graph: Array, chain: Array | None) -> Array:
        kernel = (self.metric.number, self.storage.number)
        return links.entries_of(vectors, graph, chain, *kernel, seed=self.seed)

    def neighbours(self, view: IndexView, queries: Array, effort: Effort) -> Array:
        """Return the rows nearest to prepared queries, (queries, k). Blocks, on all threads."""
        return bulk.search_all(effort, queries, view, threads=self.threads).rows

    def _link_rows(self, view: IndexView, last: int, neighbours: Neighbours) -> links.GraphLinks:
        """Link rows up to `last`, in the next version of the graph."""
        kernel = (self.metric.number, self.storage.number)
        linked = view.linked_part(view.links._replace(chain=None), view.codes).ready(view)
        effort = Effort(k=int(self.degree * CANDIDATES), top_m=_LINK_TOP_M)

        def nearest_nodes(rows: Array) -> Array:
            return neighbours(linked, view.vectors[rows].astype(np.float32), effort)

        vectors = view.vectors[:last]
        return links.extend_links(self.links, vectors, nearest_nodes, *kernel, threads=self.threads)

    def _link_lost_rows(
        self, view: IndexView, first: int, last: int, neighbours: Neighbours
    ) -> links.GraphLinks | None:
        """Add edges to those of the rows `first` to `last` that searches lose; None: no row."""
        nodes = view.nodes_to_find(first, last)
        linked = view.linked_part(view.links._replace(chain=None), view.codes)
        linked = replace(linked, is_walked=True).ready(view)
        missed, nearest = find_lost(linked, nodes, neighbours, self.degree // 2)
        if not len(missed):
            return None
        kernel = (self.metric.number, self.storage.number)
        return links.with_edges_to(self.links, view.vectors, missed, nearest, *kernel)

    def _publish_view(self) -> None:
        """Publish a new view; callers hold the lock."""
        self.epoch += 1
        self._view = self._make_view()

    def _make_view(self) -> IndexView:
        """Make a view of the present rows and links."""
        rows, newest = self.rows, self.links.newest
        view = IndexView(
            dim=self.dim, metric=self.metric, storage=self.storage, count=rows.count,
            linked=len(newest.graph), live=len(self), vectors=rows.vectors, **newest._asdict(),
            alive=rows.alive(), ids=rows.ids, columns=rows.columns, filters=rows.filters,
            epoch=self.epoch, codes=self.codes, audit=self.audit, payloads=rows.payloads,
        )  # fmt: skip
        return view.ready(self._view)
