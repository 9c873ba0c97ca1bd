"""Documents and passages as they stand on the log, and what collections make of them."""

from typing import Any

import numpy as np

from schemas.records import Chunk, CollectionDeclared, Document, DocumentPassages
from schemas.retrieval import pack_vector
from workers.retrieval.collections import Collections
from workers.retrieval.passages.changes import DocumentChange, PassagesChange
from workers.retrieval.settings import RetrievalSettings

EMBEDDER = "hash@1"


def vector_of(text: str, dim: int = 8) -> Any:
    """Not a model: equal texts have equal vectors."""
    generator = np.random.default_rng(list(text.encode()) or [0])
    return generator.standard_normal(dim).astype(np.float32)


def document(name: str, offset: int = 0, *, vector: Any = None, **fields: Any) -> DocumentChange:
    fields = {"collection": "c", "at_ms": 0, **fields}
    data = b"" if vector is None else pack_vector(vector)
    document_record = Document(document_id=name, vector=data, **fields)
    return DocumentChange(fields["collection"], name, document_record, offset)


def text(name: str, offset: int = 0, **fields: Any) -> DocumentChange:
    return document(name, offset, text="some text", **fields)


def deletion(name: str, offset: int = 0, collection: str = "c") -> DocumentChange:
    return DocumentChange(collection, name, None, offset)


def chunks(*texts: str, dim: int = 8) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(text=content, start=10 * at, vector=pack_vector(vector_of(content, dim)),
              tokens=np.arange(len(content), dtype="<i4").tobytes())
        for at, content in enumerate(texts)
    )  # fmt: skip


def record(name: str, *texts: str, offset: int = 0, **fields: Any) -> DocumentPassages:
    defaults = {
        "collection": "c", "content_hash": "", "embedder": EMBEDDER, "chunks": chunks(*texts),
        "documents_offset": offset, "document_ms": 0, "at_ms": 0,
    }  # fmt: skip
    return DocumentPassages(document_id=name, **{**defaults, **fields})


def passages(
    name: str, *texts: str, offset: int = 0, read_to: int = 0, **fields: Any
) -> PassagesChange:
    passages_record = record(name, *texts, offset=offset, **fields)
    return PassagesChange(passages_record.collection, name, passages_record, read_to)


def no_passages(name: str, read_to: int = 0, collection: str = "c") -> PassagesChange:
    return PassagesChange(collection, name, None, read_to)


def declared(name: str = "c", **fields: Any) -> CollectionDeclared:
    return CollectionDeclared(collection=name, **{"at_ms": 0, **fields})


def collections(**settings: Any) -> Collections:
    return Collections(RetrievalSettings(**settings))


def rows(shard_collections: Collections, collection: str = "c") -> set[str]:
    """Ids of all rows, as the log has them; the words must agree."""
    index, shelf = (
        shard_collections.indexes.get(collection),
        shard_collections.stores.get(collection),
    )
    row_ids = set(index.rows.row_of) if index is not None else set()
    by_words = set(shelf.words._state.number_of) if shelf is not None else set()
    assert {row_id for row_id in row_ids if isinstance(row_id, bytes)} == by_words
    return {row_id.decode() if isinstance(row_id, bytes) else str(row_id) for row_id in row_ids}
