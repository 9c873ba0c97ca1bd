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
from tests.streams.bridge.samples import asked, body_of, pair, prompts, record

ROW = {"id": 7, "text": "hi"}
DEBEZIUM = {"before": None, "after": ROW, "source": {"table": "t"}, "op": "c", "ts_ms": 1}
EVENT = {"specversion": "1.0", "id": "e1", "source": "/shop", "type": "made"}


async def said(value: Any, content_type: str = "") -> Fields | None:
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
async def test_texts_are_read_in_their_charset(value: bytes, content_type: str) -> None:
    assert await said(value, content_type) == {"text": "größe"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
async def test_json_may_begin_with_a_byte_order_mark(encoding: str) -> None:
    """As .NET, PowerShell and Excel write it."""
    value = json.dumps({"text": "größe"}, ensure_ascii=False).encode(encoding)
    assert await said(value) == {"text": "größe"}
    assert await said(value, "application/json") == {"text": "größe"}


@pytest.mark.parametrize("charset", ["x-klingon", "idna", "unicode_escape", "base64", "rot13"])
async def test_a_charset_that_is_none_is_named(charset: str) -> None:
    with pytest.raises(InvalidRequest, match="charset"):
        await said(b"hi", f"text/plain; charset={charset}")
    with pytest.raises(InvalidRequest, match="expected ASCII"):
        await said(b"\xff", "text/plain; charset=ascii")


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
async def test_rows_come_in_envelopes(value: Any) -> None:
    assert await said(value) == ROW
    event = {**EVENT, "data": value}
    assert await said(event, "application/cloudevents+json; charset=UTF-8") == ROW
    packed = base64.b64encode(json.dumps(value).encode()).decode()
    assert await said({**EVENT, "data_base64": packed}, "application/cloudevents+json") == ROW


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
async def test_rows_go(value: Any) -> None:
    assert await said(value) is None


async def test_texts_come_in_events() -> None:
    plain = {**EVENT, "datacontenttype": "text/plain", "data": "größe"}
    packed = base64.b64encode("größe".encode("latin-1")).decode()
    other = {**EVENT, "datacontenttype": "text/plain; charset=latin-1", "data_base64": packed}
    for event in (plain, other):
        assert await said(event, "application/cloudevents+json") == {"text": "größe"}
    assert await said({**EVENT}, "application/cloudevents+json") is None


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
async def test_what_says_nothing_says_why(value: Any, content_type: str, why: str) -> None:
    with pytest.raises((RecordError, InvalidRequest), match=why):
        await said(value, content_type)


# As prompts


@pytest.mark.parametrize(
    "number",
    ["12345678901234567890123", "18446744073709551616", "0.1234567890123456789", "12.50", "1e5"],
)
async def test_numbers_keep_their_digits_in_prompts(number: str) -> None:
    """In metadata, as an object and as text, and in what templates make of rows."""
    value = f'{{"text":"hi","metadata":{{"id":{number},"of":[{number}]}}}}'.encode()
    expected = f'{{"id":{number},"of":[{number}]}}'
    assert (await asked(value)).metadata == expected
    as_text = {"text": "hi", "metadata": expected}
    assert (await asked(as_text)).metadata == expected
    of = pair(template="{id} of {all}", metadata=("id", "all"))
    found = await asked(f'{{"id":{number},"all":[{number}]}}'.encode(), of)
    assert body_of(found)["messages"][0]["content"] == f"{number} of [{number}]"
    assert found.metadata == f'{{"id":{number},"all":[{number}]}}'


async def test_who_counts_with_numbers_gets_numbers() -> None:
    value = b'{"text":"hi","temperature":0.70,"seed":12,"deadline_ms":5000.0,"stop":["a"]}'
    found = await asked(value)
    assert body_of(found)["temperature"] == 0.7
    assert found.deadline_ms == 5_000
    schema = b'{"type":"json_schema","json_schema":{"name":"a","schema":{"maximum":1.50}}}'
    found = await asked(b'{"text":"hi","response_format":' + schema + b"}")
    assert json.loads(found.schema) == {"maximum": 1.5}


async def test_a_filter_with_more_digits_than_a_float_has_is_refused() -> None:
    of = pair(model="test-model@docs")
    exact = b'{"text":"hi","retrieval":{"collection":"docs","filter":{"price":{"$lt":12.50}}}}'
    asks = body_of(await asked(exact, of))["retrieval"]["filter"]
    assert parse(text_of(asks)) == NumberRange("price", high=math.nextafter(12.5, 0))
    more = exact.replace(b"12.50", b"0.1234567890123456789")
    asks = body_of(await asked(more, of))["retrieval"]["filter"]
    with pytest.raises(InvalidRequest, match="store it as text"):
        text_of(asks)


@pytest.mark.parametrize(
    "envelope",
    [
        lambda row: {"schema": {}, "payload": row},
        lambda row: {**DEBEZIUM, "op": "c" if row else "d", "after": row},
    ],
)
async def test_prompts_come_in_envelopes(envelope: Any) -> None:
    assert body_of(await asked(envelope({"text": "hi"})))["messages"][0]["content"] == "hi"
    of = pair(template="About {text}", metadata=("id",))
    found = await asked(envelope(ROW), of)
    assert (body_of(found)["messages"][0]["content"], found.metadata) == ("About hi", '{"id":7}')
    assert await prompts(of).question(record(envelope(None))) is None
