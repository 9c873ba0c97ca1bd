"""The collections of one shard: an index each, made by the first document and fed with changes."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest, TriviumError, UnknownCollection
from schemas.records import CollectionMade, CollectionState, Document
from schemas.retrieval import unpack_vector
from schemas.rules.sizes import DIM_MAX, FLEET_BYTES_MAX
from workers.search.index.columns import Value
from workers.search.index.index import Index
from workers.search.kernels.metrics import Metric
from workers.search.service.settings import RetrievalSettings

NAME_CHARS_MAX = 128
METADATA_CHARS_MAX = 65_536
_TOLD_BYTES, _STATE_BYTES = FLEET_BYTES_MAX * 3 // 4, 64  # of a heartbeat; of each beside its name
_DIMS_MAX = 10_000  # remembered of collections, most of which may have no documents


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a document; none is left of it where `document` is None."""

    collection: str
    document_id: str
    document: Document | None


class Collections:
    """By name. Changes come from one caller at a time; searches read views meanwhile."""

    def __init__(self, settings: RetrievalSettings) -> None:
        self._settings = settings
        self.indexes: dict[str, Index] = {}
        self._dims: dict[str, int] = {}  # as this shard has told them
        self._dims_elsewhere: dict[str, int] = {}

    def learn(self, made: CollectionMade, *, here: bool) -> None:
        """What the log says of a collection; of this shard, or of another or a former one."""
        dims = self._dims if here else self._dims_elsewhere
        dims[made.collection] = made.dim
        if len(dims) > _DIMS_MAX:
            del dims[next(iter(dims))]

    def settle(self) -> None:
        """All that there was is read: from now on what has no documents binds nobody."""
        self._dims_elsewhere.clear()
        for name in [name for name in self._dims if not self.indexes.get(name)]:
            del self._dims[name]

    def untold(self) -> dict[str, int]:
        """Dimensions that the log does not tell yet."""
        held = {name: index.dim for name, index in list(self.indexes.items()) if len(index)}
        return {name: dim for name, dim in held.items() if self._dims.get(name) != dim}

    def get(self, name: str) -> Index:
        """The index of a collection; raises UnknownCollection naming those there are."""
        index = self.indexes.get(name)
        if index is None:
            known = ", ".join(sorted(self.indexes)[:10]) or "none yet"
            raise UnknownCollection(
                f"no collection {name!r:.200} on this shard; there are: {known}"
            )
        return index

    def states(self) -> tuple[CollectionState, ...]:
        """What is held, for the fleet: as much of it as a heartbeat has room for."""
        told, room = [], _TOLD_BYTES
        for name, index in sorted(self.indexes.items()):
            room -= len(name.encode()) + _STATE_BYTES
            if room < 0:
                break
            state = CollectionState(
                name=name,
                dim=index.dim,
                metric=index.metric.value,
                documents=len(index),
                missed_share=index.audit.missed_share if index.audit else 0.0,
            )  # fmt: skip
            told.append(state)
        return tuple(told)

    def apply(self, changes: Iterable[Change]) -> list[tuple[Change, TriviumError]]:
        """Bring the indexes up to date, and return what could not be done; the last change of a
        document counts. Blocks.
        """
        last = {(each.collection, each.document_id): each for each in changes}
        by_collection: dict[str, list[Change]] = {}
        for change in last.values():
            by_collection.setdefault(change.collection, []).append(change)
        failed: list[tuple[Change, TriviumError]] = []
        for name, group in by_collection.items():
            gone = [each.document_id for each in group if each.document is None]
            if gone and name in self.indexes:
                self.indexes[name].delete(gone)
            failed += self._upsert(name, [each for each in group if each.document is not None])
        return failed

    def _upsert(self, name: str, group: Sequence[Change]) -> list[tuple[Change, TriviumError]]:
        """All at once; one by one only where one of them is wrong."""
        if not group:
            return []
        try:
            self._add(name, group)
        except TriviumError as error:
            if len(group) == 1:
                return [(group[0], error)]
            return [each for change in group for each in self._upsert(name, [change])]
        return []

    def _add(self, name: str, group: Sequence[Change]) -> None:
        documents = [each.document for each in group if each.document is not None]
        vectors = [unpack_vector(document.vector) for document in documents]
        index = self.indexes.get(name)
        if index is None:
            known = self._dims.get(name) or self._dims_elsewhere.get(name)
            index = self._make(name, known or len(vectors[0]))
        elif not index:  # its dimension binds nobody
            index = self._make(name, len(vectors[0]))
        if any(len(vector) != index.dim for vector in vectors) and len(vectors) > 1:
            raise InvalidRequest("vectors of several dimensions")  # the caller goes one by one
        metadata = [_metadata(document.metadata) for document in documents]
        index.upsert([each.document_id for each in group], vectors, metadata)
        self.indexes[name] = index

    def _make(self, name: str, dim: int) -> Index:
        if not 0 < len(name) <= NAME_CHARS_MAX or "/" in name:
            raise InvalidRequest(
                f"collection: expected a name of 1 to {NAME_CHARS_MAX} characters without a slash, "
                f"found {name!r:.200}"
            )
        if dim > DIM_MAX:
            raise InvalidRequest(f"expected vectors of at most {DIM_MAX} values, found {dim}")
        self._make_room(name)
        settings = self._settings
        return Index(dim, metric=Metric(settings.metric_of(name)), degree=settings.degree)

    def _make_room(self, name: str) -> None:
        """Forget an empty collection where no other fits."""
        others = self.indexes.keys() - {name}
        if len(others) < self._settings.collections_max:
            return
        empty = next((other for other in sorted(others) if not len(self.indexes[other])), None)
        if empty is None:
            raise InvalidRequest(
                f"{len(others)} collections are held already; raise [retrieval] collections_max"
            )
        del self.indexes[empty]


def _metadata(text: str) -> dict[str, Value]:
    if not text:
        return {}
    if len(text) > METADATA_CHARS_MAX:
        raise InvalidRequest(
            f"metadata: expected at most {METADATA_CHARS_MAX} characters, found {len(text)}",
            "metadata",
        )
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"metadata: expected a JSON object: {error}", "metadata") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"metadata: expected a JSON object, found {found!r:.80}", "metadata")
    return {name: value for name, value in found.items() if value is not None}
