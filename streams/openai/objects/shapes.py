"""Callers' objects in the form of the `openai` package. Pure."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from schemas.errors import InvalidRequest
from schemas.records import FileBatch, StoredFile, VectorStore
from streams.openai.objects.bodies import FilePaging, StorePaging
from streams.openai.objects.ordered_ids import OrderedIds
from streams.openai.objects.stores import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    STATUSES,
    StoreEntry,
)
from streams.openai.objects.table import ObjectTable

PIECE_CHARS = 65_536

Json = dict[str, Any]
Item = TypeVar("Item")


def metadata_text(metadata: Mapping[str, str] | None) -> str:
    """Return a caller's metadata as a record has it: JSON, or empty for none."""
    return json.dumps(metadata, ensure_ascii=False) if metadata else ""


def file_json(file: StoredFile) -> Json:
    """Build the `file` object of the API."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_ms // 1000,
        "expires_at": file.expires_ms // 1000 if file.expires_ms else None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def store_json(table: ObjectTable, store: VectorStore, now_ms: int) -> Json:
    """Build the `vector_store` object of the API."""
    files, expires_ms = table.contents(store), table.expires_ms(store)
    counts = _counts(files.counts())
    status = IN_PROGRESS if counts[IN_PROGRESS] else COMPLETED
    if expires_ms is not None and now_ms >= expires_ms:
        status = "expired"
    return {
        "id": store.store_id,
        "object": "vector_store",
        "created_at": store.created_ms // 1000,
        "name": store.name,
        "description": store.description or None,
        "usage_bytes": files.usage_bytes,
        "file_counts": counts,
        "status": status,
        "expires_after": (
            {"anchor": "last_active_at", "days": store.expires_days} if store.expires_days else None
        ),
        "expires_at": expires_ms // 1000 if expires_ms is not None else None,
        "last_active_at": table.used_ms(store) // 1000,
        "metadata": json.loads(store.metadata or "{}"),
    }


def store_file_json(store: VectorStore, entry: StoreEntry) -> Json:
    """Build the `vector_store.file` object of the API."""
    spec, result = entry.spec, entry.result
    error = None
    if entry.status == FAILED and result is not None:
        error = {"code": result.error_code, "message": result.error}
    return {
        "id": spec.file_id,
        "object": "vector_store.file",
        "usage_bytes": result.usage_bytes if result is not None else 0,
        "created_at": spec.created_ms // 1000,
        "vector_store_id": spec.store_id,
        "status": entry.status,
        "last_error": error,
        "attributes": json.loads(spec.attributes or "{}"),
        "chunking_strategy": chunking_json(store),
    }


def chunking_json(store: VectorStore) -> Json:
    """Return how the files of a store are split into chunks."""
    if not store.chunk_tokens:
        return {"type": "other"}  # the deployment's sizes, which the gateway does not know
    sizes = {
        "max_chunk_size_tokens": store.chunk_tokens,
        "chunk_overlap_tokens": store.chunk_overlap,
    }
    return {"type": "static", "static": sizes}


def batch_json(table: ObjectTable, store: VectorStore, batch: FileBatch) -> Json:
    """Build the `vector_store.files_batch` object of the API."""
    counts = _counts(table.contents(store).counts(batch.batch_id))
    status = COMPLETED if not counts[IN_PROGRESS] else IN_PROGRESS
    if counts["total"] and counts[FAILED] == counts["total"]:
        status = FAILED
    return {
        "id": batch.batch_id,
        "object": "vector_store.files_batch",
        "created_at": batch.created_ms // 1000,
        "vector_store_id": batch.store_id,
        "status": CANCELLED if batch.cancelled else status,
        "file_counts": counts,
    }


def _counts(counts: Counter[str]) -> dict[str, int]:
    return {**{status: counts[status] for status in STATUSES}, "total": counts.total()}


def page(
    order: OrderedIds,
    paging: FilePaging | StorePaging,
    *,
    kind: str = "",
    find: Callable[[str], Item | None],
    shape: Callable[[Item], Json],
) -> Json:
    """Return a page of a list, or of one kind in it; it reads no further, however long the list is.

    Raises InvalidRequest.
    """
    for where, name in (("after", paging.after), ("before", paging.before)):
        if name is not None and name not in order:
            raise InvalidRequest(f"{where}: no such id in this list: {name[:64]!r}", where)
    is_backward = paging.before is not None and paging.after is None
    start, newer = paging.after, paging.order == "asc"
    if is_backward:
        start, newer = paging.before, not newer
    rows, has_more = list[tuple[str, Item]](), False
    until = None if is_backward else paging.before
    for name in order.beyond(start, newer=newer, kind=kind, until=until):
        if (item := find(name)) is not None:
            if has_more := len(rows) == paging.limit:
                break
            rows.append((name, item))
    if is_backward:
        rows.reverse()
    return {
        "object": "list",
        "data": [shape(item) for _, item in rows],
        "first_id": rows[0][0] if rows else None,
        "last_id": rows[-1][0] if rows else None,
        "has_more": has_more,
    }


def content_page(texts: Iterable[str]) -> Iterator[bytes]:
    """Yield the texts of a file as JSON, in pieces, as they may be long."""
    head, _, tail = orjson.dumps(whole_page([], "vector_store.file_content.page")).partition(b"[]")
    yield head + b"["
    for i, text in enumerate(texts):
        yield (b"," if i else b"") + b'{"type":"text","text":"'
        for at in range(0, len(text), PIECE_CHARS):
            yield orjson.dumps(text[at : at + PIECE_CHARS])[1:-1]
        yield b'"}'
    yield b"]" + tail


def whole_page(data: Sequence[Json], name: str, **fields: Any) -> Json:
    """Return a list that has no further pages."""
    return {"object": name, **fields, "data": list(data), "has_more": False, "next_page": None}
