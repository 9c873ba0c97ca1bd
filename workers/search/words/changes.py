"""Changes of documents and of their passages, read out of records, and what is wrong with them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from schemas.errors import RecordError, TriviumError
from schemas.records import Document
from schemas.records import DocumentPassages as Passages
from schemas.rules import metadata as rules
from schemas.rules.filters import Value
from schemas.rules.metadata import TENANT, Metadata, values_of
from workers.search.words.texts import PassageText


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """What happened to a document; none is left of it where `document` is None."""

    collection: str
    document_id: str
    document: Document | None
    offset: int = 0
    floor: int = -1  # where it was last no text, before it became text in the same batch

    def after(self, before: "DocumentChange | None") -> "DocumentChange":
        """The same, where another change of the document comes before it in a batch."""
        if before is None or not self.is_text:
            return self
        return replace(self, floor=before.floor if before.is_text else before.offset)

    @property
    def is_text(self) -> bool:
        """Whether its passages come on another topic."""
        return self.document is not None and bool(self.document.text) and not self.document.vector


@dataclass(frozen=True, slots=True)
class PassagesChange:
    """What the embedding pool made of a document; nothing is left of it where it is None."""

    collection: str
    document_id: str
    passages: Passages | None
    read_to: int = 0  # of `documents`, in the document's partition


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
    """What is kept of each passage."""
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
    """Values by field, and the tenant as one that no filter can name."""
    return rules.metadata_of(text) | ({TENANT: tenant} if tenant else {})


def names_of(topic: str, key: bytes | None) -> tuple[str, str]:
    """Of collection and document, by a record's key; raises RecordError."""
    try:
        collection, slash, document_id = (key or b"").decode().partition("/")
    except UnicodeDecodeError as error:
        raise RecordError(f"{topic}: expected a key in UTF-8: {error}") from error
    if not slash:
        raise RecordError(f"{topic}: expected the key collection/document_id, found {key!r:.200}")
    return collection, document_id
