"""Prompts by the schemas of their writers: each fetched once, and what is refused."""

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from typing import Any
from uuid import UUID

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema as StockSchema
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from schemas.codec import full_schema
from schemas.errors import BrokerUnavailable, ConfigError, RecordError
from streams.bridge.prompts import PromptParser, answer_format
from streams.bridge.records.writer_schemas import AWAY_S, WriterSchemas, decode_body, readable
from streams.log.registry import Registry
from tests.loop_stalls import unstalled
from tests.streams.bridge.samples import CODEC, body_of, pair, question_of, record
from tests.streams.gateway.samples import MODEL
from tests.streams.log.registry_stub import StubRegistry, running_registry
from tests.virtual_time import run_virtual, virtual

ROW: dict[str, Any] = {
    "type": "record",
    "name": "com.shop.Row",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    ],
}


@pytest.fixture
def stub() -> Iterator[StubRegistry]:
    with running_registry() as registry:
        yield registry


def written(schema: Any, value: Any, schema_id: int = 1) -> bytes:
    """In Confluent's framing, as stock serializers write it."""
    out = io.BytesIO(b"\x00" + schema_id.to_bytes(4, "big"))
    out.seek(5)
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def registered(stub: StubRegistry, schema: Any, subject: str = "rows-value") -> int:
    return Registry(stub.url, timeout_ms=60_000).register(subject, schema)


async def test_template_takes_fields_of_any_avro_record(stub: StubRegistry) -> None:
    value = written(ROW, {"name": "Ada", "note": None, "day": 1}, registered(stub, ROW))
    question = await question_of(value, pair(template="{name} on {day}{note?}"), stub.url)
    assert body_of(question)["messages"][0]["content"] == "Ada on 1970-01-02"


async def test_prompt_reads_fields_by_name_from_other_schema(stub: StubRegistry) -> None:
    """The producer's schema lists only the fields that it fills in."""
    writer_schema = {
        "type": "record",
        "name": "Ask",
        "fields": [
            {"name": "text", "type": "string"},
            {"name": "temperature", "type": ["null", "float"]},
            {"name": "metadata", "type": {"type": "map", "values": "string"}},
        ],
    }
    value = {"text": "hi", "temperature": None, "metadata": {"id": "7"}}
    question = await question_of(
        written(writer_schema, value, registered(stub, writer_schema)), url=stub.url
    )
    assert body_of(question) == {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert question.metadata == '{"id":"7"}'


async def test_prompt_reads_own_schema_from_registry(stub: StubRegistry) -> None:
    schema = full_schema("Prompt")
    value = {"text": "hi", "max_tokens": 3, "stop": ["a"]}
    question = await question_of(written(schema, value, registered(stub, schema)), url=stub.url)
    assert body_of(question)["max_tokens"] == 3 and body_of(question)["stop"] == ["a"]


async def test_prompt_reads_json_behind_json_schema_framing(stub: StubRegistry) -> None:
    stub.answer_instead = (200, b'{"schemaType": "JSON", "schema": "{}"}')
    question = await question_of(b'\x00\x00\x00\x00\x07{"text": "hi"}', url=stub.url)
    assert body_of(question)["messages"][0]["content"] == "hi"


async def test_writer_schemas_fetch_each_id_once(stub: StubRegistry) -> None:
    schema_id = registered(stub, ROW)
    reader = PromptParser(
        pair(template="{name}"), MODEL, CODEC, WriterSchemas(stub.url, timeout_ms=60_000)
    )
    value = written(ROW, {"name": "Ada", "note": None, "day": 1}, schema_id)
    for _ in range(3):
        await reader.question(record(value))
        with pytest.raises(RecordError, match="schema id 99: .*answered 404"):
            await reader.question(record(b"\x00\x00\x00\x00\x63"))
    asked_for = [call for call in stub.calls if "/schemas/ids/" in call]
    assert asked_for == [f"GET /schemas/ids/{schema_id}", "GET /schemas/ids/99"]


async def test_prompt_parser_fetches_schema_before_reading(stub: StubRegistry) -> None:
    """Fetching happens before reading, so that a registry outage blames no prompt."""
    reads = PromptParser(
        pair(template="{name}"), MODEL, CODEC, schemas := WriterSchemas(stub.url, 60_000)
    )
    value = written(ROW, {"name": "Ada", "note": None, "day": 1}, registered(stub, ROW))
    for prompt in (record(value), record(b"\0\0\0\0\x09x"), record({"text": "hi"}), record(None)):
        await reads.fetch_schema(prompt)
    asked_for = [call for call in stub.calls if "ids" in call]
    assert asked_for == ["GET /schemas/ids/1", "GET /schemas/ids/9"]
    assert await reads.question(record(value)) is not None and await schemas.of(1) is not None
    assert [call for call in stub.calls if "ids" in call] == asked_for


@virtual
async def test_writer_schemas_wait_for_unavailable_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts wait with it, and later prompts wait in Kafka."""
    away: list[Exception] = [BrokerUnavailable("no answer"), ConfigError("answered 500")]
    asked_for = []

    def fetch(_: Registry, schema_id: int) -> Any:
        asked_for.append(schema_id)
        if away:
            raise away.pop()
        return ROW

    monkeypatch.setattr(Registry, "fetch", fetch)
    schemas = WriterSchemas("http://registry", timeout_ms=1)
    both = await asyncio.gather(schemas.of(1), schemas.of(1))
    assert both[0] is both[1] is not None and asked_for == [1, 1, 1]


def test_writer_schemas_fail_after_long_registry_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(_: Registry, schema_id: int) -> Any:
        raise BrokerUnavailable(f"no answer about {schema_id}")

    async def ask() -> None:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(BrokerUnavailable, match="no answer about 1") as caught:
            await WriterSchemas("http://registry", timeout_ms=1).of(1)
        assert caught.value.retriable
        assert asyncio.get_running_loop().time() - began_s >= AWAY_S

    monkeypatch.setattr(Registry, "fetch", fetch)
    run_virtual(ask(), seconds=2 * AWAY_S)


LINKED = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}
NO_BYTES = {"type": "fixed", "name": "F", "size": 0}
EMPTY: dict[str, Any] = {"type": "record", "name": "E", "fields": []}
NULLS = {"type": "record", "name": "N", "fields": [{"name": "a", "type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (LINKED, "nests L in itself"),
        ({"type": "map", "values": LINKED}, "nests L in itself"),
        ({"type": "array", "items": "null"}, "a list of nothing"),
        ({"type": "array", "items": EMPTY}, "a list of nothing"),
        ({"type": "array", "items": NO_BYTES}, "a list of nothing"),
        (NULLS, "a field of nothing"),
        ({"type": "array", "items": ["null", NULLS]}, "a field of nothing"),
        ({"type": "record", "name": "R", "fields": [{"name": "x", "type": "Gone"}]}, "Unknown"),
        ({"type": "nonsense"}, "cannot be read"),
        ({"no": "schema"}, "cannot be read"),
        (7, "cannot be read"),
    ],
)
def test_writer_schemas_reject_unsafe_schema(schema: Any, message: str) -> None:
    """Recursive schemas crash a process; types of no bytes expand without limit."""
    with pytest.raises(RecordError, match=message):
        readable(schema)


def test_writer_schemas_accept_reused_named_types() -> None:
    city = {"type": "record", "name": "City", "fields": [{"name": "zip", "type": "long"}]}
    fields = [
        {"name": "a", "type": city},
        {"name": "b", "type": {"type": "array", "items": "City"}},
        {"name": "c", "type": ["null", {"type": "enum", "name": "N", "symbols": ["X"]}]},
        {"name": "d", "type": {"type": "map", "values": "N"}},
        {"name": "e", "type": {"type": "bytes", "logicalType": "decimal", "precision": 4}},
    ]
    schema = {"type": "record", "name": "R", "namespace": "shop", "fields": fields}
    assert readable(json.loads(json.dumps(schema)))["name"] == "shop.R"


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda v: v[:-2], "the body is damaged"), (lambda v: v + b"x", "1 bytes follow the record")],
)
def test_record_error_reports_damaged_body(change: Any, message: str) -> None:
    value = change(written(ROW, {"name": "Ada", "note": "n", "day": 1}))
    with pytest.raises(RecordError, match=message):
        decode_body(value, 5, readable(ROW))


LONGS: dict[str, Any] = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "text", "type": "string"}, {"name": "n", "type": {
        "type": "array", "items": "long"
    }}],
}  # fmt: skip


async def test_record_rejects_too_many_values_without_stall(
    stub: StubRegistry,
) -> None:
    """Decoding 4 MiB of numbers would take 0.5 s and 100 MB."""
    schema_id, of = registered(stub, LONGS), pair(template="{text}")
    many = written(LONGS, {"text": "hi", "n": [1] * 4_000_000}, schema_id)
    with pytest.raises(RecordError, match="expected fewer values"):
        await unstalled(question_of(many, of, stub.url))
    as_in_json = written(LONGS, {"text": "hi", "n": [1 << 18] * 65_000}, schema_id)
    assert body_of(await question_of(as_in_json, of, stub.url))["messages"][0]["content"] == "hi"


GUID = UUID(int=1)
GUIDED = b"\x01" + GUID.bytes


@pytest.mark.parametrize(
    ("header_id", "path"),
    [(b"\x00\x00\x00\x00\x01", "/schemas/ids/1"), (GUIDED, f"/schemas/guids/{GUID}")],
)
async def test_prompt_reads_schema_id_from_header(
    stub: StubRegistry, header_id: bytes, path: str
) -> None:
    """Stock serializers can write the id into a header."""
    registered(stub, ROW)
    headers = [("__value_schema_id", header_id)]
    value = written(ROW, {"name": "Ada", "note": None, "day": 1})[5:]
    question = await question_of(value, pair(template="{name}"), stub.url, headers=headers)
    assert body_of(question)["messages"][0]["content"] == "Ada"
    assert stub.calls[-1] == f"GET {path}"
    prompt = record(value, headers=headers)
    assert answer_format(pair(), prompt) == "avro"
    assert not record(b"\n", headers=headers).is_empty, "five, as a number"
    assert record(None, headers=headers).is_empty


async def test_prompt_reads_stock_serializer_with_header_ids(stub: StubRegistry) -> None:
    headers: list[tuple[str, bytes]] = []
    place = SerializationContext("rows", MessageField.VALUE, headers)
    with closing(SchemaRegistryClient({"url": stub.url})) as stock:
        conf = {"schema.id.serializer": header_schema_id_serializer}
        serialize = AvroSerializer(stock, StockSchema(json.dumps(ROW), "AVRO"), conf=conf)
        value = serialize({"name": "Ada", "note": None, "day": date(1970, 1, 2)}, place)
    assert [name for name, _ in headers] == ["__value_schema_id"]
    question = await question_of(value, pair(template="{name} on {day}"), stub.url, headers=headers)
    assert body_of(question)["messages"][0]["content"] == "Ada on 1970-01-02"


async def test_prompt_reads_json_with_schema_id_in_header(stub: StubRegistry) -> None:
    stub.answer_instead = (200, b'{"schemaType": "JSON", "schema": "{}"}')
    headers = [("__value_schema_id", GUIDED)]
    question = await question_of(b'{"text": "hi"}', url=stub.url, headers=headers)
    assert body_of(question)["messages"][0]["content"] == "hi"
    assert answer_format(pair(), record(b"{}", headers=headers)) == "json"


@pytest.mark.parametrize("header_id", [b"\x00\x01", b"\x02" + bytes(16), b"\x01" + bytes(4)])
async def test_prompt_rejects_invalid_schema_id_in_header(header_id: bytes) -> None:
    with pytest.raises(RecordError, match=f"expected a schema id .* the id {header_id.hex()}"):
        await question_of(b"x", headers=[("__value_schema_id", header_id)])


async def test_prompt_rejects_value_that_is_not_record(stub: StubRegistry) -> None:
    schema = {"type": "array", "items": "long"}
    stub.answer_instead = (200, json.dumps({"schema": json.dumps(schema)}).encode())
    with pytest.raises(RecordError, match=r"expected a record, found \[1\]"):
        await question_of(written(schema, [1]), url=stub.url)


async def test_prompt_keeps_digits_of_32_bit_floats(stub: StubRegistry) -> None:
    """They are printed as Java writes them, not widened to 64 bits."""
    some = {"type": "array", "items": ["null", {"type": "float"}]}
    by_name = {"type": "map", "values": "float"}
    schema = {
        "type": "record",
        "name": "Measured",
        "fields": [
            {"name": "real", "type": "float"},
            {"name": "some", "type": some},
            {"name": "named", "type": by_name},
            {"name": "double", "type": "double"},
        ],
    }
    value = {"real": 0.1, "some": [12.34, None, 3e38], "named": {"a": -1e-45}, "double": 0.1}
    of = pair(template="{real} {some} {named} {double}")
    question = await question_of(written(schema, value, registered(stub, schema)), of, stub.url)
    content = body_of(question)["messages"][0]["content"]
    assert content == '0.1 [12.34, null, 3e+38] {"a": -1e-45} 0.1'
