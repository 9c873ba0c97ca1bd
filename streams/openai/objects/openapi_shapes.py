"""Callers' objects on the OpenAPI page: bodies of calls, and schemas of answers."""

from typing import Any

from pydantic import BaseModel

from streams.openai.objects.bodies import (
    AttributesBody,
    BatchBody,
    ConversationBody,
    ConversationChangeBody,
    ConversationItemsBody,
    StoreBody,
    StoreChangeBody,
    StoreFileBody,
    StoreSearchBody,
)

_FILES, _STORES = "/v1/files", "/v1/vector_stores"
_FILE, _STORE = _FILES + "/{file_id}", _STORES + "/{vector_store_id}"
_IN_STORE, _BATCHES = _STORE + "/files", _STORE + "/file_batches"
_OF_STORE, _BATCH = _IN_STORE + "/{file_id}", _BATCHES + "/{batch_id}"
_CONVERSATIONS = "/v1/conversations"
_CONVERSATION = _CONVERSATIONS + "/{conversation_id}"
_ITEMS = _CONVERSATION + "/items"
UPLOAD = _FILES
BODIES: dict[str, type[BaseModel]] = {
    _STORES: StoreBody,
    _STORE: StoreChangeBody,
    _STORE + "/search": StoreSearchBody,
    _IN_STORE: StoreFileBody,
    _OF_STORE: AttributesBody,
    _BATCHES: BatchBody,
    _CONVERSATIONS: ConversationBody,
    _CONVERSATION: ConversationChangeBody,
    _ITEMS: ConversationItemsBody,
}
TEXT: dict[str, Any] = {"type": "string"}
_NUMBER = {"type": "number"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
UPLOAD_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": TEXT},
    "required": ["file", "purpose"],
}


def shape_of(kind: str, **properties: Any) -> dict[str, Any]:
    properties = {"object": {"const": kind}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_shape(items: dict[str, Any], kind: str = "list") -> dict[str, Any]:
    data = {"type": "array", "items": items}
    return shape_of(kind, data=data, has_more={"type": "boolean"})


def _deletion_shape(kind: str) -> dict[str, Any]:
    return shape_of(kind, id=TEXT, deleted={"const": True})


def _counts() -> dict[str, Any]:
    names = ("in_progress", "completed", "failed", "cancelled", "total")
    return {"type": "object", "properties": dict.fromkeys(names, COUNT), "required": [*names]}


_FILE_SHAPE = shape_of(
    "file", id=TEXT, bytes=COUNT, created_at=COUNT, filename=TEXT, purpose=TEXT, status=TEXT
)
_STORE_SHAPE = shape_of(
    *("vector_store",), id=TEXT, created_at=COUNT, name=TEXT, usage_bytes=COUNT, status=TEXT,
    file_counts=_counts(), metadata={"type": "object"},
)  # fmt: skip
_STORE_FILE = shape_of(
    *("vector_store.file",), id=TEXT, created_at=COUNT, vector_store_id=TEXT, status=TEXT,
    usage_bytes=COUNT, attributes={"type": "object"},
)  # fmt: skip
_BATCH_SHAPE = shape_of(
    *("vector_store.files_batch",), id=TEXT, created_at=COUNT, vector_store_id=TEXT,
    status=TEXT, file_counts=_counts(),
)  # fmt: skip
_RESULT = {
    "type": "object",
    "properties": {"file_id": TEXT, "filename": TEXT, "score": _NUMBER},
    "required": ["file_id", "filename", "score", "attributes", "content"],
}
_PIECE = {"type": "object", "properties": {"text": TEXT}, "required": ["type", "text"]}
_CONVERSATION_SHAPE = shape_of(
    "conversation", id=TEXT, created_at=COUNT, metadata={"type": "object"}
)
_ITEM = {"type": "object", "properties": {"id": TEXT, "type": TEXT}, "required": ["id", "type"]}
SHAPES: dict[tuple[str, str], dict[str, Any]] = {
    (_FILES, "post"): _FILE_SHAPE,
    (_FILES, "get"): list_shape(_FILE_SHAPE),
    (_FILE, "get"): _FILE_SHAPE,
    (_FILE, "delete"): _deletion_shape("file"),
    (_STORES, "post"): _STORE_SHAPE,
    (_STORES, "get"): list_shape(_STORE_SHAPE),
    (_STORE, "get"): _STORE_SHAPE,
    (_STORE, "post"): _STORE_SHAPE,
    (_STORE, "delete"): _deletion_shape("vector_store.deleted"),
    (_STORE + "/search", "post"): list_shape(_RESULT, "vector_store.search_results.page"),
    (_IN_STORE, "post"): _STORE_FILE,
    (_IN_STORE, "get"): list_shape(_STORE_FILE),
    (_OF_STORE, "get"): _STORE_FILE,
    (_OF_STORE, "post"): _STORE_FILE,
    (_OF_STORE, "delete"): _deletion_shape("vector_store.file.deleted"),
    (_OF_STORE + "/content", "get"): list_shape(_PIECE, "vector_store.file_content.page"),
    (_BATCHES, "post"): _BATCH_SHAPE,
    (_BATCH, "get"): _BATCH_SHAPE,
    (_BATCH + "/cancel", "post"): _BATCH_SHAPE,
    (_BATCH + "/files", "get"): list_shape(_STORE_FILE),
    (_CONVERSATIONS, "post"): _CONVERSATION_SHAPE,
    (_CONVERSATION, "get"): _CONVERSATION_SHAPE,
    (_CONVERSATION, "post"): _CONVERSATION_SHAPE,
    (_CONVERSATION, "delete"): _deletion_shape("conversation.deleted"),
    (_ITEMS, "post"): list_shape(_ITEM),
    (_ITEMS, "get"): list_shape(_ITEM),
    (_ITEMS + "/{item_id}", "get"): _ITEM,
    (_ITEMS + "/{item_id}", "delete"): _CONVERSATION_SHAPE,
}
CONTENT = (_FILE + "/content", "get")
