"""Converts a file of a vector store to documents with ids, texts and metadata. Pure."""

import json
from collections.abc import Iterator, Sequence

from schemas.records import CollectionDeclared, Document, StoredFile, StoreFile, VectorStore
from schemas.rules.sizes import DOCUMENT_CHARS_MAX
from streams.openai.indexing.reading import FileText
from streams.openai.objects.attaching import FILE_ID, REVISION

PIECE_CHARS_MAX = DOCUMENT_CHARS_MAX // 4  # small enough for passages of all sizes


def document_id(file_id: str, number: int) -> str:
    """Build the id of a file's document; the same file gives the same ids."""
    return f"{file_id}/{number}"


def documents_of(
    file: StoredFile, spec: StoreFile, texts: Sequence[FileText], now_ms: int
) -> Iterator[Document]:
    """Yield all documents of a file; each has the file's attributes in the store."""
    attributes, number = json.loads(spec.attributes or "{}"), 0
    for text in texts:
        facts = {"title": text.title or file.filename, "source": file.filename, **attributes}
        facts |= {FILE_ID: file.file_id, REVISION: spec.revision}
        metadata = json.dumps(facts, ensure_ascii=False)
        for piece in pieces(text.text):
            yield Document(
                document_id=document_id(file.file_id, number),
                collection=spec.store_id,
                text=piece,
                metadata=metadata,
                tenant=spec.tenant,
                at_ms=now_ms,
            )
            number += 1


def pieces(text: str, chars_max: int = PIECE_CHARS_MAX) -> Iterator[str]:
    """Yield a long text in pieces, divided between paragraphs, lines or words if possible."""
    first = 0
    while len(text) - first > chars_max:
        end = first + chars_max
        for mark in ("\n\n", "\n", " "):
            if (position := text.rfind(mark, first + chars_max // 2, end)) > 0:
                end = position + len(mark)
                break
        if text[first:end].strip():
            yield text[first:end]
        first = end
    if text[first:].strip():
        yield text[first:]


def declaration(store: VectorStore, now_ms: int) -> CollectionDeclared:
    """Return the record of who may search a store's collection, and how its texts are split."""
    return CollectionDeclared(
        collection=store.store_id,
        tenants=(store.tenant,),
        chunk_tokens=store.chunk_tokens,
        chunk_overlap=store.chunk_overlap,
        at_ms=now_ms,
    )
