"""Decides whether a document's passages are made, kept or dropped, and builds them. Pure."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from schemas.errors import InvalidRequest, RecordError, RecordTooLarge
from schemas.records import Chunk, Document, DocumentPassages
from schemas.retrieval import Vector, pack_vector
from schemas.rules.metadata import check_metadata, metadata_of
from schemas.rules.sizes import CHUNKS_MAX, DOCUMENT_CHARS_MAX
from workers.embed.chunking import Span

Tokens = Callable[[str], Sequence[int]]
CUTTING = 2  # version of the cutting; another number has all documents embedded again


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a collection's texts are cut, and the models that read them."""

    chunk_tokens: int
    chunk_overlap: int
    embedder: str
    tokenizer: str  # the served model's, empty for none


@dataclass(frozen=True, slots=True)
class PassagesRef:
    """Where a document's passages are on the log, and hashes of their inputs."""

    content_hash: str
    facts_hash: str
    offset: int  # of their record in its partition of passages


class DocumentAction(Enum):
    """What a worker does about a document's passages."""

    NOTHING = "nothing"
    DROP = "drop"  # delete passages that are no longer of use
    KEEP = "keep"  # same text, other facts: write the same passages again
    EMBED = "embed"


def choose_action(
    document: Document | None, cutting: Cutting, ref: PassagesRef | None
) -> DocumentAction:
    """Choose the action for a document, None for a deleted one; `ref` is to its passages.

    A document that comes with a vector needs no passages."""
    if document is None or document.deleted or document.vector or not document.text:
        return DocumentAction.DROP if ref else DocumentAction.NOTHING
    if ref is None or ref.content_hash != content_hash(document.text, cutting):
        return DocumentAction.EMBED
    same = ref.facts_hash == facts_hash(document.tenant, document.metadata)
    return DocumentAction.NOTHING if same else DocumentAction.KEEP


def check_text(document: Document) -> None:
    """Raise RecordError for a document whose text cannot be cut and embedded."""
    chars = len(document.text)
    if chars > DOCUMENT_CHARS_MAX:
        raise RecordTooLarge(
            f"document {document.document_id[:200]}: expected at most {DOCUMENT_CHARS_MAX} "
            f"characters of text, found {chars}; divide it into several documents"
        )
    if not document.text.strip():
        raise RecordError(
            f"document {document.document_id[:200]}: expected a text with words, found only spaces"
        )
    try:
        check_metadata(metadata_of(document.metadata), {})
    except InvalidRequest as error:
        raise RecordError(f"document {document.document_id[:200]}: {error.message}") from error


def check_spans(document: Document, spans: Sequence[Span]) -> None:
    """Raise RecordTooLarge for more passages than a document may have."""
    if len(spans) > CHUNKS_MAX:
        raise RecordTooLarge(
            f"document {document.document_id[:200]}: expected at most {CHUNKS_MAX} passages, found "
            f"{len(spans)}; divide it into several documents"
        )


def content_hash(text: str, cutting: Cutting) -> str:
    """Return the hash of all inputs of passages; with an equal hash nothing is embedded."""
    how = [
        CUTTING,
        cutting.chunk_tokens,
        cutting.chunk_overlap,
        cutting.embedder,
        cutting.tokenizer,
    ]
    return _digest(json.dumps([*how, text]))


def facts_hash(tenant: str, metadata: str) -> str:
    """Return the hash of a document's tenant and metadata."""
    return _digest(json.dumps([tenant, metadata]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def passages_ref(record: DocumentPassages, offset: int) -> PassagesRef:
    """Return the reference to a record of passages at this offset."""
    return PassagesRef(record.content_hash, facts_hash(record.tenant, record.metadata), offset)


def passages_of(
    document: Document,
    cutting: Cutting,
    spans: Sequence[Span],
    vectors: Vector,
    tokens: Tokens | None,
    *,
    documents_offset: int,
    now_ms: int,
) -> DocumentPassages:
    """Build the record; `tokens` returns the served model's token ids, None for no ids."""
    chunks = []
    for span, vector in zip(spans, vectors, strict=True):
        text = document.text[span.start : span.end]
        ids = b"" if tokens is None else np.asarray(tokens(text), "<i4").tobytes()
        chunks.append(Chunk(text=text, start=span.start, vector=pack_vector(vector), tokens=ids))
    return DocumentPassages(
        document_id=document.document_id,
        collection=document.collection,
        tenant=document.tenant,
        metadata=document.metadata,
        content_hash=content_hash(document.text, cutting),
        embedder=cutting.embedder,
        tokenizer=cutting.tokenizer,
        chunks=tuple(chunks),
        documents_offset=documents_offset,
        document_ms=document.at_ms,
        at_ms=now_ms,
    )
