"""What values say in the forms that producers write: charsets, envelopes, events, digits."""

import base64
import json
import math
from typing import Any

import pytest

from schemas.codec import unreadable_value
from schemas.errors import InvalidRequest, RecordError
from schemas.rules.filters import NumberRange, parse, text_of
from streams.bridge.records.record import Fields, fields_of
from streams.bridge.records.writer_schemas import WriterSchemas
from tests.streams.bridge.samples import body_of, pair, prompts, question_of, record

ROW = {"id": 7, "text": "hi"}
DEBEZIUM = {"before": None, "after": ROW, "source": {"table": "t"}, "op": "c", "ts_ms": 1}
EVENT = {"specversion": "1.0", "id": "e1", "source": "/shop", "type": "made"}


async def read_fields(value: Any, content_type: str = "") -> Fields | None:
    headers = [("content-type", content_type.encode())] if content_type else []
    return await fields_of(record(value, headers=headers), WriterSchemas("", 1))


@pytest.mark.parametrize(
    ("value", "content_type"),
    [
        ("größe".encode("iso-8859-1"), "text/plain; charset=iso-8859-1"),
        ("größe".encode("cp1252"), 'Text/Plain;Charset="windows-1252"'),
        ("größe".encode("utf-16"), "text/plain; charset=utf-16"),
        ("größe".encode("utf-16-le"), "text/plain; charset=utf-16le"),
        ("größe".encode("utf-16"), "text/plain"),
        ("größe".encode("utf-8-sig"), "text/plain"),
        ("größe".encode("utf-8-sig"), "text/plain; charset=utf-8"),
        ("größe".encode(), "text/plain; charset=UTF-8; format=flowed"),
    ],
)
async def test_record_decodes_text_in_declared_charset(value: bytes, content_type: str) -> None:
    assert await read_fields(value, content_type) == {"text": "größe"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
async def test_record_accepts_json_with_byte_order_mark(encoding: str) -> None:
    """Programs of .NET, PowerShell and Excel write one."""
    value = json.dumps({"text": "größe"}, ensure_ascii=False).encode(encoding)
    assert await read_fields(value) == {"text": "größe"}
    assert await read_fields(value, "application/json") == {"text": "größe"}


@pytest.mark.parametrize("charset", ["x-klingon", "idna", "unicode_escape", "base64", "rot13"])
async def test_record_error_names_unknown_charset(charset: str) -> None:
    with pytest.raises(InvalidRequest, match="charset"):
        await read_fields(b"hi", f"text/plain; charset={charset}")
    with pytest.raises(InvalidRequest, match="expected ASCII"):
        await read_fields(b"\xff", "text/plain; charset=ascii")


@pytest.mark.parametrize(
    "value",
    [
        ROW,
        {"schema": {"type": "struct"}, "payload": ROW},
        {"schema": None, "payload": ROW},
        DEBEZIUM,
        {**DEBEZIUM, "op": "u", "before": {"id": 7, "text": "ho"}},
        {**DEBEZIUM, "op": "r"},
        {"schema": {}, "payload": DEBEZIUM},
        {**DEBEZIUM, "after": json.dumps(ROW)},
        {**ROW, "__deleted": "false"},
    ],
)
async def test_record_unwraps_row_from_envelope(value: Any) -> None:
    assert await read_fields(value) == ROW
    event = {**EVENT, "data": value}
    assert await read_fields(event, "application/cloudevents+json; charset=UTF-8") == ROW
    packed = base64.b64encode(json.dumps(value).encode()).decode()
    assert (
        await read_fields({**EVENT, "data_base64": packed}, "application/cloudevents+json") == ROW
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b" null",
        {"schema": {}, "payload": None},
        {**DEBEZIUM, "op": "d", "before": ROW, "after": None},
        {**DEBEZIUM, "op": "t", "after": None},
        {**ROW, "__deleted": "true"},
        {**ROW, "__deleted": True},
    ],
)
async def test_record_without_row_has_no_fields(value: Any) -> None:
    assert await read_fields(value) is None


async def test_record_reads_text_from_cloud_event() -> None:
    plain = {**EVENT, "datacontenttype": "text/plain", "data": "größe"}
    packed = base64.b64encode("größe".encode("latin-1")).decode()
    encoded_event = {
        **EVENT,
        "datacontenttype": "text/plain; charset=latin-1",
        "data_base64": packed,
    }
    for event in (plain, encoded_event):
        assert await read_fields(event, "application/cloudevents+json") == {"text": "größe"}
    assert await read_fields({**EVENT}, "application/cloudevents+json") is None


@pytest.mark.parametrize(
    ("value", "content_type", "why"),
    [
        ({"op": "u", "before": ROW, "after": None}, "", "expected a row under `after`, found none"),
        ({"schema": {}, "payload": 7}, "", "expected a record, found 7"),
        ({"text": "hi"}, "application/cloudevents+json", "with specversion, found"),
        ([EVENT], "application/cloudevents-batch+json", "expected a JSON object"),
        ({**EVENT, "data": "hi"}, "application/cloudevents+json", "expected a record, found 'hi'"),
        ({**EVENT, "data_base64": "%"}, "application/cloudevents+json", "expected base64"),
        ({**EVENT, "data_base64": 7}, "application/cloudevents+json", "expected base64"),
        (unreadable_value("offset 7 cannot be read: zstd"), "", "offset 7 cannot be read: zstd"),
        (unreadable_value("offset 7 cannot"), "text/plain", "offset 7 cannot"),
    ],
)
async def test_record_error_states_expected_value(value: Any, content_type: str, why: str) -> None:
    with pytest.raises((RecordError, InvalidRequest), match=why):
        await read_fields(value, content_type)


# As prompts


@pytest.mark.parametrize(
    "number",
    ["12345678901234567890123", "18446744073709551616", "0.1234567890123456789", "12.50", "1e5"],
)
async def test_prompt_keeps_digits_of_numbers(number: str) -> None:
    """This holds for metadata, as an object or a text, and for templates."""
    value = f'{{"text":"hi","metadata":{{"id":{number},"of":[{number}]}}}}'.encode()
    expected = f'{{"id":{number},"of":[{number}]}}'
    assert (await question_of(value)).metadata == expected
    as_text = {"text": "hi", "metadata": expected}
    assert (await question_of(as_text)).metadata == expected
    of = pair(template="{id} of {all}", metadata=("id", "all"))
    question = await question_of(f'{{"id":{number},"all":[{number}]}}'.encode(), of)
    assert body_of(question)["messages"][0]["content"] == f"{number} of [{number}]"
    assert question.metadata == f'{{"id":{number},"all":[{number}]}}'


async def test_prompt_converts_number_fields_to_numbers() -> None:
    value = b'{"text":"hi","temperature":0.70,"seed":12,"deadline_ms":5000.0,"stop":["a"]}'
    question = await question_of(value)
    assert body_of(question)["temperature"] == 0.7
    assert question.deadline_ms == 5_000
    schema = b'{"type":"json_schema","json_schema":{"name":"a","schema":{"maximum":1.50}}}'
    question = await question_of(b'{"text":"hi","response_format":' + schema + b"}")
    assert json.loads(question.schema) == {"maximum": 1.5}


async def test_filter_rejects_number_beyond_float_precision() -> None:
    of = pair(model="test-model@docs")
    exact = b'{"text":"hi","retrieval":{"collection":"docs","filter":{"price":{"$lt":12.50}}}}'
    asks = body_of(await question_of(exact, of))["retrieval"]["filter"]
    assert parse(text_of(asks)) == NumberRange("price", high=math.nextafter(12.5, 0))
    inexact_prompt = exact.replace(b"12.50", b"0.1234567890123456789")
    asks = body_of(await question_of(inexact_prompt, of))["retrieval"]["filter"]
    with pytest.raises(InvalidRequest, match="store it as text"):
        text_of(asks)


@pytest.mark.parametrize(
    "envelope",
    [
        lambda row: {"schema": {}, "payload": row},
        lambda row: {**DEBEZIUM, "op": "c" if row else "d", "after": row},
    ],
)
async def test_prompt_is_read_from_row_envelope(envelope: Any) -> None:
    assert body_of(await question_of(envelope({"text": "hi"})))["messages"][0]["content"] == "hi"
    of = pair(template="About {text}", metadata=("id",))
    question = await question_of(envelope(ROW), of)
    assert (body_of(question)["messages"][0]["content"], question.metadata) == (
        "About hi",
        '{"id":7}',
    )
    assert await prompts(of).question(record(envelope(None))) is None
