"""What records on a topic of prompts ask, in every form that producers write; and what is wrong."""

import dataclasses
import json
from typing import Any

import pytest

from schemas.errors import BodyTooLarge, InvalidRequest, RecordError, TriviumError
from schemas.records import Priority, Prompt, PromptMessage
from streams.bridge.prompts import VALUE_BYTES_MAX, PromptParser, answer_format
from streams.bridge.records.writer_schemas import WriterSchemas
from streams.calls.request.body import CompletionBody
from tests.streams.bridge.samples import CODEC, body_of, pair, question_of, record
from tests.streams.gateway.samples import MODEL

SCHEMA = '{"type": "object", "required": ["stars"]}'
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": json.loads(SCHEMA)},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
FULL: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "Look."},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "model": "test-model@docs",
    "session_id": "s9",
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 7,
    "seed": 3,
    "stop": ["\n"],
    "response_format": {"type": "json_object"},
    "retrieval": {"collection": "docs"},
    "priority": "standard",
    "deadline_ms": 1_000,
    "metadata": {"id": 1},
}
BODY_FIELDS = FULL.keys() - {"session_id", "priority", "deadline_ms", "metadata"}


def as_record(fields: dict[str, Any]) -> Prompt:
    """Return the same fields as Trivium's own record, with JSON objects as text."""
    prompt_fields = as_texts(fields)
    if "messages" in prompt_fields:
        prompt_fields["messages"] = [
            PromptMessage(**as_texts(message)) for message in prompt_fields["messages"]
        ]
    return Prompt(**prompt_fields)


def as_texts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with objects, and lists of tools and calls, as JSON text."""
    return {
        name: json.dumps(value)
        if isinstance(value, dict) or name in ("tools", "tool_calls")
        else value
        for name, value in fields.items()
    }


@pytest.mark.parametrize("value", [FULL, CODEC.encode(as_record(FULL))], ids=["json", "avro"])
async def test_prompt_means_same_in_json_and_avro(value: Any) -> None:
    question = await question_of(value)
    assert body_of(question) == {name: FULL[name] for name in BODY_FIELDS}
    assert (question.session_id, question.priority, question.deadline_ms) == (
        "s9",
        Priority.STANDARD,
        1_000,
    )
    assert question.metadata == '{"id":1}'
    assert question.wants_json and not question.schema


@pytest.mark.parametrize("value", [{"text": "hi"}, CODEC.encode(Prompt(text="hi"))])
async def test_prompt_takes_missing_fields_from_pair(value: Any) -> None:
    of = pair(
        model="test-model@docs",
        system="Be brief.",
        schema=SCHEMA,
        retrieval={"collection": "docs"},
        temperature=0.0,
        max_tokens=9,
        stop=("x",),
        priority="standard",
        deadline_ms=5,
    )
    question = await question_of(value, of)
    assert body_of(question) == {
        "model": "test-model@docs",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ],
        "temperature": 0.0,
        "max_tokens": 9,
        "stop": ["x"],
        "response_format": FORM,
        "retrieval": {"collection": "docs"},
    }
    assert (question.priority, question.deadline_ms, question.metadata) == (
        Priority.STANDARD,
        5,
        None,
    )
    assert question.wants_json and json.loads(question.schema) == json.loads(SCHEMA)


async def test_prompt_takes_tools_from_pair() -> None:
    """Its own tools replace those of the pair, and their choice."""
    of = pair(template="{a}", tools=json.dumps([TOOL]), tool_choice="required")
    body = body_of(await question_of({"a": "hi"}, of))
    assert (body["tools"], body["tool_choice"]) == ([TOOL], "required")
    of = dataclasses.replace(of, template="")
    body = body_of(await question_of({"text": "hi", "tool_choice": "auto"}, of))
    assert (body["tools"], body["tool_choice"]) == ([TOOL], "auto")
    own_tool = {"type": "function", "function": {"name": "other"}}
    body = body_of(await question_of({"text": "hi", "tools": [own_tool]}, of))
    assert body["tools"] == [own_tool] and "tool_choice" not in body


async def test_prompt_takes_remaining_fields_from_deployment() -> None:
    question = await question_of({"text": "hi", "temperature": None, "stop": []})
    assert body_of(question) == {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert (question.session_id, question.priority, question.deadline_ms) == (
        "",
        Priority.BATCH,
        600_000,
    )
    assert not question.wants_json


async def test_prompt_overrides_pair() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    value = {"messages": messages, "temperature": 0, "response_format": {"type": "text"}}
    question = await question_of(value, pair(system="s", temperature=1.0, schema=SCHEMA))
    assert body_of(question)["messages"] == messages
    assert body_of(question)["temperature"] == 0
    assert not question.wants_json and not question.schema


@pytest.mark.parametrize("value", [{"name": "Ada", "id": 7}, b' {"name": "Ada", "id": 7}'])
async def test_template_accepts_any_json_object(value: Any) -> None:
    of = pair(template="Greet {name}", metadata=("id", "absent"))
    question = await question_of(value, of)
    assert body_of(question)["messages"] == [{"role": "user", "content": "Greet Ada"}]
    assert question.metadata == '{"id":7,"absent":null}'


async def test_template_accepts_other_trivium_record() -> None:
    answer = CODEC.encode(Prompt(text="first"))
    question = await question_of(answer, pair(template="After {text}"))
    assert body_of(question)["messages"][0]["content"] == "After first"


async def test_prompt_reads_plain_text_by_content_type() -> None:
    headers = [("Content-Type", b"text/plain; charset=utf-8")]
    question = await question_of("{é".encode(), headers=headers)
    assert body_of(question)["messages"] == [{"role": "user", "content": "{é"}]


@pytest.mark.parametrize("as_text", [False, True])
async def test_prompt_accepts_complete_api_body(as_text: bool) -> None:
    body = {"prompt": [1, 2], "stream": True, "top_k": 3, "priority": "standard"}
    value = {"body": json.dumps(body) if as_text else body, "deadline_ms": 9}
    question = await question_of(value, pair(system="s", temperature=1.0))
    assert isinstance(question.body, CompletionBody)
    assert body_of(question) == {
        "model": MODEL, "prompt": [1, 2], "top_k": 3
    }  # fmt: skip
    assert (question.priority, question.deadline_ms) == (Priority.STANDARD, 9)


DEEP = b'{"text": "a", "metadata": ' + b'{"a": ' * 300 + b"1" + b"}" * 301
WRONG: list[tuple[Any, type[TriviumError], str]] = [
    ({}, InvalidRequest, "expected one of text, messages, body, found none"),
    ({"text": ""}, InvalidRequest, "found none"),
    ({"text": " \n"}, InvalidRequest, "text: expected a text"),
    ({"text": 7}, InvalidRequest, "text: expected a text, found 7"),
    ({"text": "a", "messages": [1]}, InvalidRequest, "found text and messages"),
    ({"text": "a", "colour": 1}, InvalidRequest, "colour: unknown field; expected one of text,"),
    ({"text": "a", "colour": None}, InvalidRequest, "colour: unknown field"),
    ({"text": "a", "temperature": "x"}, InvalidRequest, "temperature: expected"),
    ({"text": "a", "temperature": 3}, InvalidRequest, "temperature: expected"),
    ({"text": "a", "max_tokens": 1.5}, InvalidRequest, "max_tokens: expected"),
    ({"text": "a", "priority": "high"}, InvalidRequest, "priority: expected one of"),
    ({"text": "a", "priority": {}}, InvalidRequest, "priority: expected one of"),
    ({"text": "a", "deadline_ms": 0}, InvalidRequest, "deadline_ms: expected a whole number"),
    ({"text": "a", "deadline_ms": True}, InvalidRequest, "deadline_ms: expected a whole number"),
    ({"text": "a", "metadata": "x"}, InvalidRequest, "metadata: expected a JSON object"),
    ({"text": "a", "metadata": [1]}, InvalidRequest, "metadata: expected a text, found"),
    ({"text": "a", "metadata": {"a": "x" * 70_000}}, InvalidRequest, "metadata: expected at most"),
    (DEEP, InvalidRequest, "metadata: cannot be written as JSON: Recursion limit reached"),
    ({"text": "a", "session_id": "ü"}, InvalidRequest, "session_id: expected 1 to 128 printable"),
    ({"text": "a", "retrieval": {"k": 1}}, InvalidRequest, "retrieval.collection: required"),
    ({"text": "a", "response_format": "{"}, InvalidRequest, "response_format: expected a JSON obj"),
    ({"text": "a", "tools": "{"}, InvalidRequest, "tools: expected a JSON list"),
    ({"text": "a", "tools": "{}"}, InvalidRequest, "tools: expected a JSON list, found"),
    ({"text": "a", "tools": 3}, InvalidRequest, "tools: expected a JSON list, found 3"),
    ({"text": "a", "tools": [3]}, InvalidRequest, "tools.0: expected a valid dictionary"),
    ({"text": "a", "tool_choice": "{"}, InvalidRequest, "tool_choice: expected a JSON object"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]},
        InvalidRequest,
        "messages.0.tool_calls: expected a JSON list",
    ),
    ({"body": {"messages": []}, "tools": [TOOL]}, InvalidRequest, "tools: expected none beside"),
    ({"messages": "x"}, InvalidRequest, "messages: expected a valid list"),
    ({"messages": {"role": "user"}}, InvalidRequest, "messages: expected a valid list"),
    ({"messages": [{"role": ""}]}, InvalidRequest, "messages.0.role: expected"),
    ({"body": {"messages": []}}, InvalidRequest, "messages: expected at least 1"),
    ({"body": {"input": "x"}}, InvalidRequest, "prompt: required, but missing"),
    ({"body": "[]"}, InvalidRequest, r"body: expected a JSON object, found \[\]"),
    ({"body": {"prompt": "a"}, "endpoint": {}}, InvalidRequest, "endpoint: expected one of /v1/c"),
    ({"text": "a", "endpoint": "/v1/responses"}, InvalidRequest, "endpoint: expected none but"),
    ({"body": {"prompt": "a"}, "model": "b"}, InvalidRequest, "model: expected none beside body"),
    ({"body": {"prompt": "a", "n": 2}}, InvalidRequest, "n: expected one answer to a prompt"),
    ({"body": {"prompt": ["a", "b"]}}, InvalidRequest, "n: expected one answer to a prompt"),
    (b"hello", RecordError, r"expected a JSON object, Avro that .* or a header content-type: text"),
    (b"[]", RecordError, "expected a JSON object, Avro"),
    (b'"x"', RecordError, "expected a JSON object, Avro"),
    (b'{"text": "\xff"}', InvalidRequest, "the value: expected UTF-8"),
    (b'{"text": "a"', InvalidRequest, "the value: expected a JSON object: "),
    (b'{"text": NaN}', InvalidRequest, "the value: expected a JSON object: "),
    (b'{"a":' * 2_000, InvalidRequest, "the value: expected a JSON object: "),
    (b'{"messages": [' + b"{}," * 70_000, InvalidRequest, "at most 65536 values"),
    (b"{" + b" " * VALUE_BYTES_MAX, BodyTooLarge, "the value: expected at most 4194304 bytes"),
    (b"\xc3\x01" + bytes(8), RecordError, "unknown schema fingerprint"),
    (b"\xc3\x01", RecordError, "expected an Avro framing marker"),
    (CODEC.encode(Prompt(stop=("",) * 20_000)), InvalidRequest, "stop: expected at most 16384"),
    (CODEC.encode(Prompt(stop=("",) * 300_000)), RecordError, "expected fewer values"),
    (CODEC.encode(Prompt(text="abc"))[:-3], RecordError, "Prompt: the body is damaged"),
    (b"\x00\x00", RecordError, "expected a schema id and a record, found 2 bytes"),
    (b"\x00\x00\x00\x00\x07", RecordError, r"schema id 7: no schema registry is named \(log.sch"),
]


@pytest.mark.parametrize(("value", "kind", "message"), WRONG, ids=range(len(WRONG)))
async def test_prompt_error_names_invalid_field(
    value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        await question_of(value, pair(system="Be brief."))
    assert isinstance(caught.value, TriviumError) and not caught.value.retriable
    name, _, is_about_it = caught.value.message.partition(": ")
    if isinstance(caught.value, InvalidRequest) and is_about_it and " " not in name:
        assert caught.value.param == name


async def test_prompt_rejects_text_with_invalid_utf8() -> None:
    with pytest.raises(InvalidRequest, match="the value: expected UTF-8"):
        await question_of(b"\xff", headers=[("content-type", b"text/plain")])


async def test_template_error_names_required_field() -> None:
    with pytest.raises(InvalidRequest, match="template: expected a field name, found none"):
        await question_of({"nam": "Ada"}, pair(template="Greet {name}"))


@pytest.mark.parametrize("value", [None, b"", b"null", b" null\n"])
def test_prompt_without_value_is_deletion(value: bytes | None) -> None:
    assert record(value).is_empty
    assert not record(b"{}").is_empty


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        ("prompt", b"{}", "json"),
        ("prompt", b"nonsense", "json"),
        ("prompt", None, "json"),
        ("prompt", b"\xc3\x01damaged", "avro"),
        ("prompt", b"\x00\x00\x00\x00\x01", "avro"),
        ("json_envelope", b"\xc3\x01", "json_envelope"),
        ("avro", b"{}", "avro"),
    ],
)
def test_answer_format_follows_prompt_or_pair(
    form: str, value: bytes | None, expected: str
) -> None:
    assert answer_format(pair(format=form), record(value)) == expected


def test_full_sample_covers_all_prompt_fields() -> None:
    assert {field.name for field in dataclasses.fields(Prompt)} == {
        *FULL,
        "text",
        "body",
        "endpoint",
    }


@pytest.mark.parametrize(
    ("pair_max", "deployment", "got"),
    [
        ("interactive", "interactive", Priority.INTERACTIVE),
        ("batch", "interactive", Priority.BATCH),
        ("standard", "batch", Priority.BATCH),
        ("interactive", "standard", Priority.STANDARD),
    ],
)
async def test_prompt_priority_is_limited_by_pair_and_deployment(
    pair_max: str, deployment: str, got: Priority
) -> None:
    """A line of a batch cannot claim to be interactive."""
    prompts = PromptParser(
        pair(priority_max=pair_max), MODEL, CODEC, WriterSchemas("", 1), priority_max=deployment
    )
    for value in (
        {"text": "a", "priority": "interactive"},
        {"body": {"prompt": "a", "priority": "interactive"}},
    ):
        question = await prompts.question(record(value))
        assert question is not None and question.priority is got
        assert question.body.priority is None, "nothing else says so"  # type: ignore[union-attr]
