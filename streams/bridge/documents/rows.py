"""Converts a row of a table to a document; the same row always gives the same document.

It reads keys and values of change streams, and each form of a deleted row
(`streams/bridge/records/record.py`). Only `WriterSchemas` does I/O, once per schema id. Called by
`streams/bridge/documents/feed.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest, RecordError
from schemas.records import Document
from schemas.topics import document_key
from streams.bridge.config import DocumentSource
from streams.bridge.records.exact_json import json_text, loads
from streams.bridge.records.record import PromptRecord, fields_of, unwrap_connect
from streams.bridge.records.template import Template, look_up
from streams.bridge.records.writer_schemas import WriterSchemas, decode_body, schema_id_of

UNAVAILABLE = "__debezium_unavailable_value"  # placeholder of a long column that did not change
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowChange:
    """The new content of a document, or its deletion."""

    key: str
    document: Document | None


async def change_of(
    record: PromptRecord, source: DocumentSource, schemas: WriterSchemas
) -> RowChange:
    """Return the change of a row's record. Raises RecordError for a record that is no row, and
    BrokerUnavailable if the schema registry is unavailable for long.
    """
    try:
        row = await fields_of(record, schemas)
        key = await _decode_key(record, schemas)
        document_id = _id(_key(key), row, source)
        document = None if row is None else _document(document_id, row, source, record.timestamp_ms)
    except InvalidRequest as error:
        raise RecordError(error.message) from error
    except RecursionError as error:
        raise RecordError("value: expected a row that is nested less deeply") from error
    return RowChange(document_key(source.collection, document_id), document)


async def _decode_key(record: PromptRecord, schemas: WriterSchemas) -> Any:
    """Return a decoded Avro key, or the bytes of any other key."""
    raw = record.key
    if not raw or (schema_ref := schema_id_of(raw, record.headers, "key")) is None:
        return raw
    schema_id, start = schema_ref
    schema = await schemas.of(schema_id)
    return raw[start:] if schema is None else decode_body(raw, start, schema)


def _document(document_id: str, row: Row, source: DocumentSource, at_ms: int) -> Document | None:
    text = Template(source.text).fill(row)
    if UNAVAILABLE in text:
        raise RecordError(
            f"document {document_id[:200]}: its text did not come with this change; have the "
            "database send it: ALTER TABLE … REPLICA IDENTITY FULL"
        )
    if not text.strip():
        return None
    fields = {name: look_up(name, row) for name in source.metadata}
    metadata = {name: value for name, value in fields.items() if value is not None}
    return Document(
        document_id=document_id,
        collection=source.collection,
        text=text,
        metadata=json_text(metadata) if metadata else "",
        tenant=Template(source.tenant).fill(row),
        at_ms=at_ms,
    )


def _id(key: Row, row: Row | None, source: DocumentSource) -> str:
    if source.id:
        document_id = Template(source.id).fill(key or row or {})
    elif len(key) == 1:
        (only,) = key.values()
        document_id = only if isinstance(only, str) else json_text(only) if only is not None else ""
    else:
        raise RecordError(
            f"key: expected one field, or `id` in [[bridge.documents]], found {sorted(key)}"
        )
    try:
        document_id.encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            f"key: expected characters, found {document_id!r:.80}: {error}"
        ) from error
    if not document_id:
        raise RecordError("key: expected the id of a document, found none")
    return document_id


def _key(key: Any) -> Row:
    """Return the fields of a key; a key that is no object becomes the field `id`."""
    if key in (None, b"", b"null"):
        return {}
    if not isinstance(key, bytes):
        return key if isinstance(key, dict) else {"id": key}
    try:
        text = key.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"key: expected text, found {key[:80]!r}") from error
    try:
        payload = unwrap_connect(loads(key))
    except ValueError as error:
        if "\\ud" in text.lower():
            raise RecordError(f"key: expected characters, found {text[:80]!r}: {error}") from error
        return {"id": text}
    if isinstance(payload, dict):
        return payload
    return {"id": payload if isinstance(payload, str) else text}
