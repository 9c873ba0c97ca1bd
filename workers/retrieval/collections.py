"""The collections of one shard: each has an index, which its first document creates.

A row is a document that came with a vector, or a passage of a document that came as text. All
passages of a document change in one step. Operators' declarations are stored here: which tenants
may search a collection, and which model embeds its passages.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest, InvalidVector, TriviumError, UnknownCollection
from schemas.records import CollectionDeclared, CollectionMade, CollectionState
from schemas.retrieval import unpack_vector
from schemas.rules.metadata import TENANT
from schemas.rules.sizes import COLLECTION_CHARS_MAX, DIM_MAX, FLEET_BYTES_MAX, is_collection
from workers.retrieval.declarations import CollectionDeclarations
from workers.retrieval.passages.changes import (
    AnyChange,
    DocumentChange,
    Failures,
    PassagesChange,
    group_by_collection,
    metadata_of,
    texts_of,
)
from workers.retrieval.passages.passage_store import PassageStore
from workers.retrieval.passages.texts import payload_of_text
from workers.retrieval.settings import RetrievalSettings
from workers.vector.filters.filters import EqualFilter, ExistsFilter, Filter
from workers.vector.fulltext.index import WordIndex
from workers.vector.graph.build import GraphOf, own_graph
from workers.vector.index.index import Index
from workers.vector.index.query import ExternalId
from workers.vector.index.view import UNCALIBRATED
from workers.vector.kernels.metrics import Metric, Storage
from workers.vector.limits import CUDA_TOP_M_MAX, SCANNED_ROWS_MAX, TOP_M_MAX

_BEAT_BYTES, _STATE_BYTES = FLEET_BYTES_MAX * 3 // 4, 112  # of a heartbeat; of each beside its name
_DIMS_MAX = 10_000  # remembered dimensions; most of their collections may have no documents


class Collections:
    """A shard's indexes and passages, by collection. One caller changes them at a time, while
    searches read views."""

    def __init__(self, settings: RetrievalSettings, graph_of: GraphOf = own_graph) -> None:
        self._settings = settings
        self._graph_of = graph_of
        self.indexes: dict[str, Index] = {}
        self._from_files: frozenset[str] = frozenset()  # collections that take no documents
        self.stores: dict[str, PassageStore] = {}
        self.declared = CollectionDeclarations()
        self.change_lock = asyncio.Lock()  # locked while collections are changed
        self.linked: asyncio.Event | None = None  # set after rows were linked; None: no upkeep yet
        self.held_back_ms = 0.0  # total time that the feeds of both topics waited for links
        self.snapshot_offsets: dict[str, dict[str, dict[int, int]]] = {}  # by collection and topic
        self._dims: dict[str, int] = {}  # dimensions that this shard has published
        self._dims_elsewhere: dict[str, int] = {}

    async def wait_for_room(self) -> None:
        """Wait while more rows lack edges than searches are allowed to scan."""
        while self.linked is not None and self.are_behind():
            began_s = time.monotonic()
            self.linked.clear()
            await self.linked.wait()
            self.held_back_ms += 1_000 * (time.monotonic() - began_s)

    def are_behind(self) -> bool:
        """Return whether an index has too many rows without edges; small indexes need none."""
        indexes = list(self.indexes.values())
        return any(
            index.loose > self._settings.loose_max and index.rows.count > SCANNED_ROWS_MAX
            for index in indexes
        )

    def serve_files(self, indexes: Mapping[str, Index]) -> None:
        """Serve collections that were read from index files; they take no documents."""
        self._from_files = frozenset(indexes)
        self.indexes.update(indexes)

    def is_from_file(self, name: str) -> bool:
        """Return whether a collection was read from an index file."""
        return name in self._from_files

    def of_documents(self) -> dict[str, Index]:
        """Return the indexes by collection, without those that were read from files."""
        pairs = list(self.indexes.items())
        return {name: index for name, index in pairs if not self.is_from_file(name)}

    def clear(self) -> None:
        """Forget all documents and all declarations."""
        for name in self.of_documents():
            del self.indexes[name]
        self.stores.clear()
        self.snapshot_offsets.clear()
        self.declared.clear()

    def has(self, topic: str, name: str, partition: int, offset: int) -> bool:
        """Return whether the collection's snapshot includes a record."""
        return offset < self.snapshot_offsets.get(name, {}).get(topic, {}).get(partition, 0)

    def learn(self, notice: CollectionMade, *, here: bool) -> None:
        """Remember a collection's published dimension; `here`: this shard published it."""
        dims = self._dims if here else self._dims_elsewhere
        dims[notice.collection] = notice.dim
        if len(dims) > _DIMS_MAX:
            del dims[next(iter(dims))]

    def declare(self, name: str, declared: CollectionDeclared | None) -> None:
        """Apply a declaration, None to remove one. Deletes passages by another model. Blocks."""
        self.declared.set(name, declared)
        bound = self.declared.embedder(name)
        store = self.stores.get(name)
        if store is not None and bound and store.embedder not in ("", bound):
            for document_id in store.documents_with_passages():
                self.indexes[name].delete(store.rows(document_id))
                store.drop(document_id)
            store.flush()

    def settle(self) -> None:
        """End the start, when all existing records are read: forget the snapshots' offsets, and
        dimensions of other shards and of collections without documents."""
        self.snapshot_offsets.clear()
        self._dims_elsewhere.clear()
        for name in [name for name in self._dims if not self.indexes.get(name)]:
            del self._dims[name]

    def unpublished_dims(self) -> dict[str, int]:
        """Return the dimensions that are not on the log yet, by collection."""
        dims = {name: index.dim for name, index in self.of_documents().items() if len(index)}
        return {name: dim for name, dim in dims.items() if self._dims.get(name) != dim}

    def get(self, name: str, tenant: str = "") -> Index:
        """Return the index of a collection; raises UnknownCollection, which names existing ones.

        For a tenant, a forbidden collection looks like one that does not exist.
        """
        index = self.indexes.get(name) if self.declared.allows(name, tenant) else None
        if index is None:
            names = (entry for entry in sorted(self.indexes) if self.declared.allows(entry, tenant))
            listing = ", ".join(list(names)[:10]) or "none yet"
            raise UnknownCollection(
                f"no collection {name!r:.200} on this shard; there are: {listing}"
            )
        return index

    def words(self, name: str) -> WordIndex:
        """Return the word index of a collection's passages."""
        return self.stores.setdefault(name, PassageStore()).words

    @staticmethod
    def rows_for(tenant: str, index: Index) -> Filter | None:
        """Return a filter of the rows that a tenant may find; None: all rows."""
        if not tenant or TENANT not in index.rows.columns.label_codes:
            return None
        return ~ExistsFilter(TENANT) | EqualFilter(TENANT, tenant)

    def check_embedder(self, name: str, embedder: str) -> None:
        """Raise InvalidVector for a vector by another model than the collection's."""
        bound = self.embedder_of(name)
        if embedder and bound and embedder != bound:
            raise InvalidVector(
                f"collection {name!r:.200} is embedded by {bound}, found a vector by {embedder}; "
                "declare the collection with that model, and its documents are embedded anew"
            )

    def embedder_of(self, name: str) -> str:
        """Return the model that a collection is bound to, empty for none."""
        store = self.stores.get(name)
        return self.declared.embedder(name) or (store.embedder if store else "")

    def states(self) -> tuple[CollectionState, ...]:
        """Return the collections' states for a heartbeat: as many as fit into it, by name."""
        states, bytes_left = [], _BEAT_BYTES
        for name, index in sorted(self.indexes.items()):
            state = self._state(name, index)
            bytes_left -= len(name.encode()) + len(state.embedder.encode()) + _STATE_BYTES
            if bytes_left < 0:
                break
            states.append(state)
        return tuple(states)

    def _state(self, name: str, index: Index) -> CollectionState:
        store, audit, recall = self.stores.get(name), index.audit, self._settings.recall_of(name)
        passages = store.passages if store else 0
        top_m_max = TOP_M_MAX if self._settings.device == "cpu" else CUDA_TOP_M_MAX
        measured = audit.top_m(recall, 10, top_m_max) if audit else UNCALIBRATED
        return CollectionState(
            name=name,
            dim=index.dim,
            metric=index.metric.value,
            documents=max(0, len(index) - passages) + (store.documents if store else 0),
            missed_share=audit.missed_share if audit else 0.0,
            passages=passages,
            embedder=self.embedder_of(name)[:128],
            rows=index.rows.count,
            dead_rows=index.rows.dead_count,
            loose_rows=max(0, index.loose),
            bytes_held=index.bytes_held,
            recall=recall,
            top_m=measured if recall else self._settings.top_m,
        )

    def apply(self, changes: Iterable[DocumentChange]) -> Failures[DocumentChange]:
        """Apply changes of documents, and return those that failed. Of several changes of one
        document only the last is applied. Blocks.
        """
        failed: Failures[DocumentChange] = []
        for name, group in self._grouped(changes, failed):
            store = self.stores.setdefault(name, PassageStore())
            self._delete(name, store, [change for change in group if change.document is None])
            self._texts(name, store, [change for change in group if change.is_text])
            with_vectors = [
                change
                for change in group
                if change.document is not None
                and not change.is_text
                and not store.is_newer(change.document_id, change.offset)
            ]
            failed += self._try_all(with_vectors, lambda part, name=name: self._add(name, part))
            store.flush()
            self._drop_empty_store(name)
        return failed

    def apply_passages(self, changes: Iterable[PassagesChange]) -> Failures[PassagesChange]:
        """Apply passages from the embedding pool, and return the changes that failed. Blocks."""
        failed: Failures[PassagesChange] = []
        for name, group in self._grouped(changes, failed):
            store = self.stores.setdefault(name, PassageStore())
            counted = []
            for change in group:
                record = change.passages
                if record is None:
                    self._delete_rows(name, store.rows(change.document_id))
                    store.drop(change.document_id)
                elif store.accepts(
                    change.document_id, record.documents_offset, change.read_to
                ) and not (self.declared.is_outdated(record)):
                    counted.append(change)
            failed += self._try_all(counted, lambda part, name=name: self._put_passages(name, part))
            store.flush()
            self._drop_empty_store(name)
        return failed

    def _grouped(
        self, changes: Iterable[AnyChange], failed: Failures[AnyChange]
    ) -> Iterator[tuple[str, list[AnyChange]]]:
        """Group changes by collection; changes of collections from index files go to `failed`."""
        for name, group in group_by_collection(changes).items():
            if self.is_from_file(name):
                failed += [(change, _is_read_from_a_file(name)) for change in group]
            else:
                yield name, group

    def _drop_empty_store(self, name: str) -> None:
        """Drop a collection's passage store if it has neither an index nor documents."""
        if name not in self.indexes and self.stores[name].is_empty:
            del self.stores[name]

    def _delete(self, name: str, store: PassageStore, group: Sequence[DocumentChange]) -> None:
        deletions = [
            change for change in group if not store.is_newer(change.document_id, change.offset)
        ]
        rows: list[ExternalId] = [change.document_id for change in group]
        rows += [row for change in deletions for row in store.rows(change.document_id)]
        self._delete_rows(name, rows)
        for change in deletions:
            store.end_document(change.document_id, change.offset)

    def _texts(self, name: str, store: PassageStore, group: Sequence[DocumentChange]) -> None:
        for change in group:
            if change.floor >= 0 and not store.is_newer(change.document_id, change.floor):
                self._delete_rows(name, store.rows(change.document_id))
                store.end_document(change.document_id, change.floor)
            store.add_document(change.document_id)
        self._delete_rows(name, [change.document_id for change in group])

    def _delete_rows(self, name: str, rows: Sequence[ExternalId]) -> None:
        index = self.indexes.get(name)
        if rows and index is not None:
            index.delete(rows)

    def _try_all(self, group: Sequence[AnyChange], add: Any) -> Failures[AnyChange]:
        """Add all changes at once; if that fails, one by one. Return the changes that failed."""
        if not group:
            return []
        try:
            add(group)
        except TriviumError as error:
            if len(group) == 1:
                return [(group[0], error)]
            return [failure for change in group for failure in self._try_all([change], add)]
        return []

    def _add(self, name: str, group: Sequence[DocumentChange]) -> None:
        documents = [change.document for change in group if change.document is not None]
        vectors = [unpack_vector(document.vector) for document in documents]
        store = self.stores[name]
        index = self._index_for(name, vectors)
        index.upsert(
            [change.document_id for change in group],
            vectors,
            [metadata_of(document.metadata, document.tenant) for document in documents],
            [payload_of_text(document.document_id, document.text) for document in documents],
            deleted_ids=[row for change in group for row in store.rows(change.document_id)],
        )
        self.indexes[name] = index
        for change in group:
            store.end_document(change.document_id, change.offset)

    def _put_passages(self, name: str, group: Sequence[PassagesChange]) -> None:
        store, embedder = self.stores[name], self.embedder_of(name)
        records = [change.passages for change in group if change.passages is not None]
        embedder = embedder or records[0].embedder
        if misfits := [record.embedder for record in records if record.embedder != embedder]:
            raise InvalidVector(
                f"collection {name!r:.200} is embedded by {embedder}, found passages by "
                f"{misfits[0] or 'nobody'}"
            )
        texts = {record.document_id: texts_of(record) for record in records}
        deleted_ids: list[ExternalId] = [record.document_id for record in records]
        deleted_ids += [row for record in records for row in store.rows(record.document_id)]
        if any(texts.values()):
            vectors = [unpack_vector(chunk.vector) for record in records for chunk in record.chunks]
            index = self._index_for(name, vectors)
            flat = [text for record in records for text in texts[record.document_id]]
            metadata = [
                fields
                for record in records
                for fields in [metadata_of(record.metadata, record.tenant)] * len(record.chunks)
            ]
            ids, payloads = [text.row_id for text in flat], [text.pack() for text in flat]
            index.upsert(ids, vectors, metadata, payloads, deleted_ids)
            self.indexes[name] = index
        else:
            self._delete_rows(name, deleted_ids)
        for record in records:
            by_row = {text.row_id: text.text for text in texts[record.document_id]}
            store.put(record.document_id, record.documents_offset, record.embedder, by_row)

    def _index_for(self, name: str, vectors: Sequence[np.ndarray[Any, Any]]) -> Index:
        """Return the collection's index, or a new one; the caller stores it.

        Raises InvalidRequest if the vectors do not fit."""
        index = self.indexes.get(name)
        if index is None:
            known_dim = self._dims.get(name) or self._dims_elsewhere.get(name)
            index = self._make(name, known_dim or len(vectors[0]))
        elif not index:  # an empty index may change its dimension
            index = self._make(name, len(vectors[0]))
        if any(len(vector) != index.dim for vector in vectors) and len(vectors) > 1:
            raise InvalidRequest("vectors of several dimensions")  # the caller retries one by one
        return index

    def _make(self, name: str, dim: int) -> Index:
        if not is_collection(name):
            raise InvalidRequest(
                f"collection: expected a name of 1 to {COLLECTION_CHARS_MAX} characters without a "
                f"slash, found {name!r:.200}"
            )
        if dim > DIM_MAX:
            raise InvalidRequest(f"expected vectors of at most {DIM_MAX} values, found {dim}")
        self._make_room(name)
        settings = self._settings
        return Index(
            dim, metric=Metric(settings.metric_of(name)), degree=settings.degree,
            storage=Storage(settings.storage_of(name)), threads=settings.lanes,
            graph_of=self._graph_of,
        )  # fmt: skip

    def _make_room(self, name: str) -> None:
        """Drop an empty collection if there are `collections_max`; raises InvalidRequest."""
        names = self.indexes.keys() - {name}
        if len(names) < self._settings.collections_max:
            return
        empty = next((spare for spare in sorted(names) if not len(self.indexes[spare])), None)
        if empty is None:
            raise InvalidRequest(
                f"{len(names)} collections are held already; raise [retrieval] collections_max"
            )
        del self.indexes[empty]


def _is_read_from_a_file(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"collection {name!r:.200} is read from an index file and takes no documents; build the "
        "file anew, or take the collection out of [retrieval] index_files",
        "collection",
    )
