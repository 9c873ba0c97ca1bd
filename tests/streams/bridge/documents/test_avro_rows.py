"""Rows that change streams write in Avro, as Kafka Connect's Avro converters make them of keys and
values, by schemas of a registry."""

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from schemas.errors import RecordError
from streams.bridge.config import DocumentSource
from streams.bridge.documents.rows import RowChange, change_of
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from tests.streams.bridge.records.test_writer_schemas import registered, written
from tests.streams.log.registry_stub import StubRegistry, running_registry

SOURCE = DocumentSource(
    topic="rows.documents", collection="handbook", text="{title}: {body?}", metadata=("day", "fee")
)
KEY = {
    "type": "record",
    "name": "Key",
    "namespace": "app.public.documents",
    "fields": [{"name": "id", "type": "long"}],
}
FEE = {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 2}
VALUE: dict[str, Any] = {
    "type": "record",
    "name": "Value",
    "namespace": "app.public.documents",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "title", "type": "string"},
        {"name": "body", "type": ["null", "string"], "default": None},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None},
        {"name": "fee", "type": ["null", FEE], "default": None},
        {"name": "__deleted", "type": ["null", "string"], "default": None},
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "app.public.documents",
    "fields": [
        {"name": "before", "type": ["null", VALUE], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
    ],
}
ROW = {"id": 7, "title": "Ferries", "body": "Pier 7.", "day": date(2020, 1, 2)}
ROW |= {"fee": Decimal("3.50"), "__deleted": None}


@pytest.fixture
def stub() -> Iterator[StubRegistry]:
    with running_registry() as registry:
        yield registry


def schema_id_for(stub: StubRegistry, schema: Any) -> int:
    """Return the schema's registered id, under a subject of its own."""
    return registered(stub, schema, f"subject-{schema}")


async def row_change(stub: StubRegistry, key: Any, value: Any, headers: Any = ()) -> RowChange:
    """Return the change that a record means, whose parts are bytes or (schema, value)."""

    def raw(part: Any) -> bytes | None:
        if not isinstance(part, tuple):
            return None if part is None else bytes(part)
        schema, value = part
        return written(schema, value, schema_id_for(stub, schema))

    record = PromptRecord(
        topic=SOURCE.topic,
        partition=1,
        offset=2,
        timestamp_ms=3,
        key=raw(key),
        value=raw(value),
        headers=headers,
    )
    return await change_of(record, SOURCE, WriterSchemas(stub.url, 60_000))


@pytest.mark.parametrize(
    "value",
    [(VALUE, ROW), (ENVELOPE, {"before": None, "after": ROW, "op": "u"})],
    ids=["unwrapped", "envelope"],
)
async def test_avro_row_becomes_document(stub: StubRegistry, value: Any) -> None:
    change = await row_change(stub, (KEY, {"id": 7}), value)
    assert change.key == "handbook/7" and change.document is not None
    assert change.document.text == "Ferries: Pier 7."
    assert change.document.metadata == '{"day": "2020-01-02", "fee": "3.50"}'


@pytest.mark.parametrize(
    "value",
    [
        None,
        (ENVELOPE, {"before": ROW, "after": None, "op": "d"}),
        (VALUE, {**ROW, "__deleted": "true"}),
    ],
    ids=["tombstone", "envelope", "rewritten"],
)
async def test_deleted_avro_row_ends_document(stub: StubRegistry, value: Any) -> None:
    assert await row_change(stub, (KEY, {"id": 7}), value) == RowChange("handbook/7", None)


@pytest.mark.parametrize("key", [("string", "7"), ("long", 7), b"7", b'{"id": 7}'])
async def test_avro_row_takes_key_of_other_converter(stub: StubRegistry, key: Any) -> None:
    """Key and value may come from different converters."""
    assert (await row_change(stub, key, (VALUE, ROW))).key == "handbook/7"


async def test_avro_row_takes_schema_ids_from_headers(stub: StubRegistry) -> None:
    ids = [b"\x00" + schema_id_for(stub, schema).to_bytes(4, "big") for schema in (KEY, VALUE)]
    headers = list(zip(("__key_schema_id", "__value_schema_id"), ids, strict=True))
    key, value = written(KEY, {"id": 7})[5:], written(VALUE, ROW)[5:]
    change = await row_change(stub, key, value, headers)
    assert change.key == "handbook/7" and change.document is not None


async def test_avro_row_rejects_damaged_record(stub: StubRegistry) -> None:
    with pytest.raises(RecordError, match="schema id 99: .*answered 404"):
        await row_change(stub, (KEY, {"id": 7}), b"\x00\x00\x00\x00\x63x")
    with pytest.raises(RecordError, match="expected a record, found 7"):
        await row_change(stub, (KEY, {"id": 7}), ("long", 7))
    with pytest.raises(RecordError, match="the body is damaged"):
        await row_change(
            stub, (KEY, {"id": 7}), written(VALUE, ROW, schema_id_for(stub, VALUE))[:9]
        )
