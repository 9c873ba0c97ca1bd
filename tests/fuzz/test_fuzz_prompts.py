"""What anybody may write on a topic of prompts: each record is a question, or an error that has an
answer and a dead letter in every format; nothing ends a bridge or holds it up."""

import io
import json
from typing import Any

import fastavro
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.codec import Schema
from schemas.errors import ConfigError, RecordError, TriviumError
from schemas.rules.sizes import RECORD_BYTES_MAX
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import FORMATS, TopicPair
from streams.bridge.dead_letters import dead_letter
from streams.bridge.prompts import FIELDS, PromptParser, PromptQuestion
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.template import Template
from streams.bridge.records.writer_schemas import WriterSchemas, decode_body, readable
from streams.log.registry import SchemaId
from streams.log.transactions import OutgoingRecord
from tests.fuzz.strategies import CODEC, JSON, changed_bytes, examples, record_bytes, text_of
from tests.loop_stalls import unstalled
from tests.streams.bridge.samples import body_of, pair
from tests.streams.gateway.samples import MODEL

LIKELY = st.sampled_from(["hi", 1, 0.5, [{"role": "user", "content": "hi"}], {"prompt": "a"}])
PROMPTS = st.dictionaries(st.sampled_from(FIELDS), LIKELY | JSON, max_size=4)
WHOLE = st.fixed_dictionaries({"text": st.text(min_size=1)}, optional={"metadata": JSON})
FIELD_NAMES = st.sampled_from([*FIELDS, "name", "a"])
TYPES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["null", "boolean", "int", "long", "double", "bytes", "string", "R", "Gone"])
    | st.sampled_from(
        [
            {"type": "int", "logicalType": "date"},
            {"type": "long", "logicalType": "timestamp-micros"},
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
            {"type": "string", "logicalType": "uuid"},
            {"type": "fixed", "name": "F", "size": 2**40},
            {"type": "enum", "name": "N", "symbols": ["A"]},
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda values: {"type": "map", "values": values}, inner)
    ),
    max_leaves=5,
)
SCHEMAS = st.builds(
    lambda names, types: {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": name, "type": field_type}
            for name, field_type in zip(names, types, strict=False)
        ],
    },
    st.lists(FIELD_NAMES, max_size=4, unique=True),
    st.lists(TYPES, min_size=4, max_size=4),
)


SCHEMA_IDS = [b"\x00" * 5, b"\x01" * 17, b"\x00", b"", None]


class OneSchema(WriterSchemas):
    """A registry in which every id means the same."""

    def __init__(self, schema: Schema | None) -> None:
        super().__init__("", 1)
        self._schema = schema

    async def of(self, schema_id: SchemaId) -> Schema | None:
        return self._schema


async def question_or_error(
    record: PromptRecord, of: TopicPair, schema: Schema | None = None
) -> PromptQuestion | None:
    """Return what the record asks; check that an error of it can be written in every form."""
    try:
        return await PromptParser(of, MODEL, CODEC, OneSchema(schema)).question(record)
    except TriviumError as error:
        answers = AnswerBuilder(of, CODEC)
        sends = [
            answers.sending(record, answers.error_answer(record, error)),
            dead_letter(record, error),
        ]
        assert all(isinstance(outgoing, OutgoingRecord) for outgoing in sends)
        assert all(outgoing.bytes_at_most < RECORD_BYTES_MAX for outgoing in sends)
        assert all(outgoing.key is not None or outgoing.value is not None for outgoing in sends)
        return None


def on_topic(value: bytes, draw: st.DataObject) -> PromptRecord:
    types = [b"text/plain", b"application/json", b"\xff", b"", None]
    headers: Any = draw.draw(st.lists(st.sampled_from(types), max_size=1))
    ids: Any = draw.draw(st.lists(st.sampled_from(SCHEMA_IDS), max_size=1))
    return PromptRecord(
        topic="rows",
        partition=0,
        offset=0,
        timestamp_ms=-1,
        key=draw.draw(st.none() | st.binary(max_size=4)),
        value=value,
        headers=[
            *(("content-type", content_type) for content_type in headers),
            *(("__value_schema_id", schema_id) for schema_id in ids),
        ],
    )


def drawn_pair(draw: st.DataObject) -> TopicPair:
    return pair(
        format=draw.draw(st.sampled_from(FORMATS)),
        template=draw.draw(st.sampled_from(["", "{text}", "{a.0.text?} {name?}"])),
        system=draw.draw(st.sampled_from(["", "s"])),
        schema=draw.draw(st.sampled_from(["", "{}"])),
    )


@examples(300)
@given(
    PROMPTS.map(text_of)
    | JSON.map(text_of)
    | PROMPTS.map(text_of).flatmap(changed_bytes)
    | record_bytes(("Prompt", "Answer", "Usage"))
    | st.binary(max_size=30),
    st.data(),
)
async def test_prompt_parser_returns_question_or_error(value: bytes, draw: st.DataObject) -> None:
    await unstalled(question_or_error(on_topic(value, draw), drawn_pair(draw)))


@examples(100)
@given(WHOLE, st.data())
async def test_prompt_parser_keeps_prompt_text(prompt: dict[str, Any], draw: st.DataObject) -> None:
    assume(prompt["text"].strip() and isinstance(prompt.get("metadata"), dict | None))
    record = PromptRecord(
        topic="rows", partition=0, offset=0, timestamp_ms=0, key=None, value=text_of(prompt)
    )
    question = await question_or_error(record, pair())
    if question is not None:  # a surrogate, or a number that nobody reads
        assert body_of(question)["messages"] == [{"role": "user", "content": prompt["text"]}]


@examples(300)
@given(SCHEMAS, st.binary(max_size=40), st.data())
async def test_bridge_survives_any_writer_schema(
    schema: Any, body: bytes, draw: st.DataObject
) -> None:
    try:
        schema = readable(schema)
    except RecordError:
        return
    value = b"\x00\x00\x00\x00\x01" + body
    await unstalled(question_or_error(on_topic(value, draw), drawn_pair(draw), schema))


@examples(100)
@given(SCHEMAS, st.data())
def test_decoder_reads_values_written_by_schema(schema: Any, draw: st.DataObject) -> None:
    """The values are encoded by fastavro itself with the same schema."""
    fields = schema["fields"] = [
        field for field in schema["fields"] if field["type"] in ("int", "long", "string")
    ]
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(-9, 9),
        "long": st.integers(-(2**63), 2**63 - 1),
        "string": st.text(),
    }
    value = {field["name"]: draw.draw(kinds[field["type"]]) for field in fields}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    assert decode_body(b"12345" + out.getvalue(), 5, readable(schema)) == value


@examples(200)
@given(
    st.text(alphabet="{}ab.?0 ", max_size=12),
    st.recursive(
        st.none() | st.text(max_size=3) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab0"), inner, max_size=2)
        ),
        max_leaves=6,
    ),
)
def test_template_fills_or_raises_template_error(text: str, value: Any) -> None:
    """Filling raises no other error, and braces of the values stay as they are."""
    try:
        template = Template(text)
    except ConfigError:
        return
    if "{" not in text and "}" not in text:
        assert template.fill({}) == text
    try:
        template.fill({"a": value, "b": "{a}"})
    except TriviumError as error:
        assert "template" in json.dumps(error.message)
