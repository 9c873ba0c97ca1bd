"""What rows are as documents: keys, envelopes, the ways to say that a row is gone, and what is no
row at all."""

import asyncio
import json
from typing import Any

import pytest

from schemas.errors import ConfigError, RecordError
from schemas.records import Document
from streams.bridge.config import BridgeSettings, DocumentSource
from streams.bridge.documents.rows import UNAVAILABLE, RowChange, change_of
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas

SOURCE = DocumentSource(
    topic="rows.documents", collection="handbook", text="{title}: {body}", metadata=("title", "at")
)
ROW = {"id": "ferry", "title": "Ferries", "body": "Pier 7.", "at": None}


def record(key: Any, value: Any) -> PromptRecord:
    def raw(part: Any) -> bytes | None:
        return part if part is None or isinstance(part, bytes) else json.dumps(part).encode()

    return PromptRecord(
        topic=SOURCE.topic, partition=1, offset=2, timestamp_ms=3, key=raw(key), value=raw(value)
    )


def row_change(key: Any, value: Any, source: DocumentSource = SOURCE) -> RowChange:
    return asyncio.run(change_of(record(key, value), source, WriterSchemas("", 1)))


FERRY = RowChange(
    "handbook/ferry",
    Document(
        document_id="ferry",
        collection="handbook",
        text="Ferries: Pier 7.",
        metadata='{"title": "Ferries"}',
        at_ms=3,
    ),
)
GONE = RowChange("handbook/ferry", None)


@pytest.mark.parametrize(
    "value",
    [
        ROW,
        {"schema": {"type": "struct"}, "payload": ROW},
        {"before": None, "after": ROW, "op": "c", "source": {}},
        {"schema": {}, "payload": {"before": None, "after": ROW, "op": "u"}},
        {**ROW, "__deleted": "false"},
    ],
)
def test_row_becomes_document_in_any_envelope(value: Any) -> None:
    assert row_change({"id": "ferry"}, value) == FERRY


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"null",
        {"schema": None, "payload": None},
        {"before": ROW, "after": None, "op": "d"},
        {**ROW, "__deleted": "true"},
        {**ROW, "title": "", "body": "", "__deleted": True},
    ],
)
def test_deleted_row_ends_document_in_any_envelope(value: Any) -> None:
    """Rows end by an empty value, by Connect's JSON null, or by a rewritten delete."""
    assert row_change({"id": "ferry"}, value) == GONE


def test_row_without_text_ends_document() -> None:
    source = DocumentSource(topic="rows.documents", collection="handbook", text="{body?}")
    assert row_change({"id": "ferry"}, {**ROW, "body": None}, source) == GONE


@pytest.mark.parametrize(
    ("key", "document_id"),
    [
        ({"id": "a"}, "a"),
        ({"id": 17}, "17"),
        ({"schema": {}, "payload": {"id": 17}}, "17"),
        (b"a", "a"),
        (b'"a"', "a"),
        (b"0017", "0017"),
        (b"1e5", "1e5"),
        (b"17", "17"),
    ],
)
def test_row_takes_document_id_from_only_key_field(key: Any, document_id: str) -> None:
    assert row_change(key, None).key == f"handbook/{document_id}"


def test_row_with_composite_key_requires_id_template() -> None:
    source = DocumentSource(topic="rows.documents", collection="handbook", id="{shop}-{id}")
    assert row_change({"shop": 3, "id": "a"}, None, source).key == "handbook/3-a"
    assert row_change(None, {"shop": 3, "id": "b", "text": "x"}, source).key == "handbook/3-b"
    with pytest.raises(RecordError, match=r"expected one field, or `id` .* found \['id', 'shop'\]"):
        row_change({"shop": 3, "id": "a"}, None)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ({"id": "a"}, b"{", "the value: expected a JSON object"),
        ({"id": "a"}, b"[1]", r"expected a JSON object, .* found b'\[1\]'"),
        ({"id": "a"}, b"\xff", "the value: expected UTF-8"),
        ({"id": "a"}, {"title": "T"}, "expected a field body, found none"),
        ({"id": "a"}, {**ROW, "body": UNAVAILABLE}, "REPLICA IDENTITY FULL"),
        ({"id": None}, ROW, "expected the id of a document"),
        ({"id": ""}, None, "expected the id of a document"),
        ({"id": "\ud800"}, None, "expected characters"),
        (b"\xff", ROW, "key: expected text"),
        ({"id": "a"}, b"\x00\x00\x00\x00\x07x", r"no schema registry is named \(log.schema_reg"),
        (None, ROW, "expected one field"),
        (b"null", ROW, "expected one field"),
    ],
)
def test_row_error_states_expected_input(key: Any, value: Any, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        row_change(key, value)


def test_row_document_belongs_to_named_tenant() -> None:
    source = DocumentSource(
        topic="rows.documents", collection="handbook", text="{body}", tenant="{owner}"
    )
    document = row_change({"id": "a"}, {**ROW, "owner": "harbour"}, source).document
    assert document is not None
    assert document.tenant == "harbour"


def test_document_source_rejects_invalid_settings() -> None:
    with pytest.raises(ConfigError, match=r"bridge.documents \(t\): text: expected the name"):
        DocumentSource(topic="t", collection="c", text="{")
    with pytest.raises(ConfigError, match="collection: .*found 'a/b'"):
        DocumentSource(topic="t", collection="a/b")
    twice = (SOURCE, SOURCE)
    with pytest.raises(ConfigError, match="expected each topic once"):
        BridgeSettings(documents=twice)
