"""Checks files that callers add to a vector store, and builds their desired states. Pure."""

import json
from collections.abc import Sequence

from schemas.errors import InvalidRequest, NotFound
from schemas.records import StoreFile, VectorStore
from schemas.rules.metadata import is_number
from streams.openai.objects.bodies import (
    AutoChunks,
    StaticChunks,
    StoreFileBody,
    attributes_text,
)
from streams.openai.objects.stores import PRESENT, Store
from streams.openai.objects.table import ObjectTable

FILE_ID, REVISION = "file_id", "file_revision"  # the gateway's attributes, besides those of callers
_RESERVED = {FILE_ID, REVISION}
_OURS = {"title": False, "source": False}  # texts that every document has
KEYS_MAX = 48  # attributes of all files of a store; an index has a column for each


def chunk_sizes(chunks: AutoChunks | StaticChunks | None) -> tuple[int, int]:
    """Return the tokens of a passage and of its overlap for a `VectorStore`.

    Raises InvalidRequest if the overlap is more than half of a passage.
    """
    if not isinstance(chunks, StaticChunks):
        return 0, -1
    sizes = chunks.static
    if 2 * sizes.chunk_overlap_tokens > sizes.max_chunk_size_tokens:
        raise InvalidRequest(
            "chunking_strategy.static.chunk_overlap_tokens: expected at most half of "
            f"max_chunk_size_tokens={sizes.max_chunk_size_tokens}, found "
            f"{sizes.chunk_overlap_tokens}",
            "chunking_strategy",
        )
    return sizes.max_chunk_size_tokens, sizes.chunk_overlap_tokens


def new_specs(
    table: ObjectTable,
    store: VectorStore,
    bodies: Sequence[StoreFileBody],
    batch_id: str,
    now_ms: int,
) -> list[StoreFile]:
    """Return the desired states of files to add. Raises NotFound or InvalidRequest if any file is
    invalid."""
    kinds = attribute_kinds(table, store)
    contents = table.contents(store)
    return [_new_spec(table, store, contents, body, kinds, batch_id, now_ms) for body in bodies]


def _new_spec(
    table: ObjectTable,
    store: VectorStore,
    contents: Store,
    body: StoreFileBody,
    kinds: dict[str, bool],
    batch_id: str,
    now_ms: int,
) -> StoreFile:
    if table.file(store.tenant, body.file_id) is None:
        raise NotFound(f"no such file: {body.file_id!r}")
    sizes = chunk_sizes(body.chunking_strategy)
    if body.chunking_strategy is not None and sizes != (store.chunk_tokens, store.chunk_overlap):
        raise InvalidRequest(
            "chunking_strategy: all files of a vector store are cut alike; say how when it is made",
            "chunking_strategy",
        )
    attributes = attributes_text(body.attributes)
    check_kinds(kinds, attributes)
    entry = contents.entry(body.file_id)
    return StoreFile(
        store_id=store.store_id,
        file_id=body.file_id,
        tenant=store.tenant,
        attributes=attributes,
        batch_id=batch_id,
        target_state=PRESENT,
        revision=table.revision(store, body.file_id) + 1,
        created_ms=now_ms if entry is None else entry.spec.created_ms,
    )


def attribute_kinds(table: ObjectTable, store: VectorStore) -> dict[str, bool]:
    """Return by attribute of a store's files whether it is a number. A file that is being changed
    counts, too, since its documents are indexed one after the other."""
    return {**table.contents(store).kinds(), **_OURS}


def check_kinds(kinds: dict[str, bool], attributes: str) -> None:
    """Raise InvalidRequest for attributes that do not fit those of other files in an index."""
    for key, value in json.loads(attributes or "{}").items():
        if key in _RESERVED:
            raise InvalidRequest(f"attributes.{key}: every document has it; name another", key)
        if kinds.setdefault(key, is_number(value)) != is_number(value):
            expected = "a number" if kinds[key] else "a text or truth value"
            raise InvalidRequest(
                f"attributes.{key}: expected {expected}, as files of the store have it, found "
                f"{value!r:.80}; take the file out of the store first",
                "attributes",
            )
    if len(kinds) > KEYS_MAX:
        raise InvalidRequest(
            f"attributes: expected at most {KEYS_MAX} different keys in a store, found "
            f"{len(kinds)}",
            "attributes",
        )
