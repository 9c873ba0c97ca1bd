"""Changes of documents and of their passages, which the feeds make from records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from schemas.errors import RecordError, TriviumError
from schemas.records import Document
from schemas.records import DocumentPassages as Passages
from schemas.rules import metadata as rules
from schemas.rules.filters import Value
from schemas.rules.metadata import TENANT, Metadata, values_of
from workers.retrieval.passages.texts import PassageText


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """A change of a document; `document` is None if it was deleted."""

    collection: str
    document_id: str
    document: Document | None
    offset: int = 0
    floor: int = -1  # offset of its last change that was no text, earlier in the same batch

    def after(self, before: "DocumentChange | None") -> "DocumentChange":
        """Return this change with the `floor` of the document's change before it in a batch."""
        if before is None or not self.is_text:
            return self
        return replace(self, floor=before.floor if before.is_text else before.offset)

    @property
    def is_text(self) -> bool:
        """Return whether the document came as text: its passages come on another topic."""
        return self.document is not None and bool(self.document.text) and not self.document.vector


@dataclass(frozen=True, slots=True)
class PassagesChange:
    """A change of a document's passages; `passages` is None if they were deleted."""

    collection: str
    document_id: str
    passages: Passages | None
    read_to: int = 0  # next offset of `documents` in the document's partition


AnyChange = TypeVar("AnyChange", DocumentChange, PassagesChange)
Failures = list[tuple[AnyChange, TriviumError]]


def group_by_collection(changes: Iterable[AnyChange]) -> Mapping[str, list[AnyChange]]:
    """Group changes by collection, keeping the last one of each document."""
    last = {(change.collection, change.document_id): change for change in changes}
    by_collection: dict[str, list[AnyChange]] = {}
    for change in last.values():
        by_collection.setdefault(change.collection, []).append(change)
    return by_collection


def texts_of(passages: Passages) -> list[PassageText]:
    """Return the stored form of each passage."""
    metadata = metadata_of(passages.metadata)
    source = next((metadata[field] for field in ("source", "path", "url") if field in metadata), "")
    title = metadata.get("title", "")
    return [
        PassageText(
            document_id=passages.document_id,
            number=number,
            start=chunk.start,
            text=chunk.text,
            tokens=chunk.tokens,
            title=_as_text(title),
            source=_as_text(source),
            offset=passages.documents_offset,
            content=passages.content_hash,
        )
        for number, chunk in enumerate(passages.chunks)
    ]


def _as_text(value: Value | list[Value]) -> str:
    return ", ".join(map(str, values_of(value)))


def metadata_of(text: str, tenant: str = "") -> Metadata:
    """Parse metadata, and add the tenant as a field that no request's filter can name."""
    return rules.metadata_of(text) | ({TENANT: tenant} if tenant else {})


def names_of(topic: str, key: bytes | None) -> tuple[str, str]:
    """Return collection and document id from a record's key; raises RecordError."""
    try:
        collection, slash, document_id = (key or b"").decode().partition("/")
    except UnicodeDecodeError as error:
        raise RecordError(f"{topic}: expected a key in UTF-8: {error}") from error
    if not slash:
        raise RecordError(f"{topic}: expected the key collection/document_id, found {key!r:.200}")
    return collection, document_id
