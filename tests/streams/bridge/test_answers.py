"""Answers as records and as bytes, in every format; and those that are errors."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from schemas.codec import Codec
from schemas.errors import InvalidAnswer, InvalidRequest, RecordTooLarge, WorkerLost
from schemas.records import Answer, AnswerDelta, AnswerPart, DeltaKind, StreamRetrieved
from streams.bridge.answers import AnswerBuilder, AnswerParts
from streams.bridge.config import TopicPair
from streams.calls.request.check_process import ANSWER_PROCESS, WAITING_MAX
from streams.calls.stream.stream import Stream
from tests.loop_stalls import unstalled
from tests.schemas.examples import example
from tests.streams.bridge.samples import CODEC, KEY, limits, pair, question_of, record, stream
from tests.streams.gateway.samples import MODEL, stream_end

SCHEMA = '{"type": "object", "required": ["stars"]}'
PLACE = {
    "trivium-prompt-topic": b"rows",
    "trivium-prompt-partition": b"1",
    "trivium-prompt-offset": b"7",
}
JSON, AVRO = {"content-type": b"application/json"}, {"content-type": b"avro/binary"}
WHEN: dict[str, int] = {"asked_ms": 10, "first_token_ms": 11, "ended_ms": 12, "tries": 2}


async def answered(
    *texts: str,
    of: TopicPair | None = None,
    value: Any = None,
    retrieved: Any = None,
    aside_ms: int = 60_000,
    **end: Any,
) -> Answer:
    """Return the answer to a prompt, of these tokens."""
    of = of or pair()
    value = value or {"text": "hi", "metadata": {"id": 7}}
    question = await question_of(value, of)
    answer_stream = stream(*texts, retrieved=retrieved, **end)
    return await AnswerBuilder(of, CODEC, aside_ms=aside_ms).answer(
        record(value), question, KEY, answer_stream, **WHEN
    )


async def test_answer_has_all_fields_of_completion() -> None:
    assert await answered("Hel", "lo", finish_reason="length") == Answer(
        prompt_topic="rows",
        prompt_partition=1,
        prompt_offset=7,
        prompt_ms=5,
        request_id="q1",
        text="Hello",
        finish_reason="length",
        model=MODEL,
        prompt_tokens=7,
        cached_tokens=4,
        completion_tokens=2,
        asked_ms=10,
        first_token_ms=11,
        ended_ms=12,
        tries=2,
        metadata='{"id":7}',
    )


async def test_answer_contains_citations_and_retrieved_tokens() -> None:
    retrieved: StreamRetrieved = example("trivium.StreamRetrieved")
    answer = await answered("a", retrieved=StreamRetrieved(**{
        name: getattr(retrieved, name) for name in ("request_id", "collection", "citations",
    "tokens")
    }))  # fmt: skip
    cited = json.loads(answer.citations or "")
    assert [citation["document_id"] for citation in cited] == [
        c.document_id for c in retrieved.citations
    ]
    assert answer.retrieved_tokens == retrieved.tokens


def parsed_stream(*deltas: AnswerDelta, finish_reason: str = "tool_calls") -> Stream:
    """Return a stream that has ended, whose tokens were parsed to these deltas."""
    parsed = Stream("q1", restarts=True)
    for i in range(2):
        at = [delta for delta in deltas if delta.seq == i + 1]
        parsed.push(1, i, 0, 1, "", [i], deltas=at)
    end = stream_end("q1", finish_reason=finish_reason, reasoning_tokens=1)
    late = [delta for delta in deltas if delta.seq > 2]
    assert parsed.finish(replace(end, seq=2, deltas=late))
    return parsed


CALLED = (
    AnswerDelta(seq=1, kind=DeltaKind.REASONING, text="Look it up."),
    AnswerDelta(seq=1, kind=DeltaKind.CALL, call_id="call_1", name="look", text='{"q":'),
    AnswerDelta(seq=2, kind=DeltaKind.CALL, text=" 1"),
    AnswerDelta(seq=3, kind=DeltaKind.CALL, text="}"),
)
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
]


@pytest.mark.parametrize("schema", ["", SCHEMA])
async def test_answer_has_tool_calls_and_reasoning(schema: str) -> None:
    """The form binds only an answer without a call."""
    of = pair(body=True, schema=schema)
    question = await question_of({"text": "hi"}, of)
    builder = AnswerBuilder(of, CODEC, names_reasoning_content=True)
    answer = await builder.answer(
        record({"text": "hi"}), question, KEY, parsed_stream(*CALLED), **WHEN
    )
    assert json.loads(answer.tool_calls or "") == CALLS
    assert (answer.text, answer.parsed, answer.finish_reason) == ("", None, "tool_calls")
    assert (answer.reasoning, answer.reasoning_tokens) == ("Look it up.", 1)
    message = ChatCompletion.model_validate_json(answer.body or "").choices[0].message
    assert message.tool_calls is not None and message.tool_calls[0].id == "call_1"
    assert message.model_extra == {
        "reasoning": "Look it up.",
        "reasoning_content": "Look it up.",
    }
    for form in ("json", "json_envelope", "avro"):
        outgoing = AnswerBuilder(replace(of, format=form), CODEC).sending(
            record({"text": "hi"}), answer
        )
        written = outgoing.value or b""
        if form == "avro":
            assert CODEC.decode(written) == answer
            continue
        fields = json.loads(written)
        calls = fields["tool_calls"] if form == "json" else fields["payload"]["tool_calls"]
        assert (calls if form == "json" else json.loads(calls)) == CALLS


async def test_form_binds_parsed_answer_without_call() -> None:
    of = pair(schema=SCHEMA)
    question = await question_of({"text": "hi"}, of)
    deltas = [AnswerDelta(seq=1, kind=DeltaKind.CONTENT, text='{"stars": 1}')]
    stream = parsed_stream(*deltas, finish_reason="stop")
    answer = await AnswerBuilder(of, CODEC).answer(record({}), question, KEY, stream, **WHEN)
    assert (answer.text, answer.parsed, answer.tool_calls) == ('{"stars": 1}',) * 2 + (None,)
    stream = parsed_stream(replace(deltas[0], text="{}"), finish_reason="stop")
    with pytest.raises(InvalidAnswer, match="keeps to the schema"):
        await AnswerBuilder(of, CODEC).answer(record({}), question, KEY, stream, **WHEN)


def test_parts_carry_what_is_new_of_parsed_answer() -> None:
    """After a restart they begin anew."""
    stream = Stream("q1", restarts=True)
    parts = AnswerParts(record({}), stream)
    content = (AnswerDelta(seq=2, kind=DeltaKind.CONTENT, text="é?"), *CALLED[2:3])
    written = []
    for attempt in (1, 2):
        stream.push(attempt, 0, 0, 1, "", [7], deltas=CALLED[:2])
        written.append(parts.next_part())
        assert parts.next_part() is None
        stream.push(attempt, 1, 0, 1, "", [8], deltas=content)
        written.append(parts.next_part())
    end = stream_end("q1", attempt=2, finish_reason="tool_calls")
    stream.finish(replace(end, seq=2, deltas=CALLED[3:]))
    written.append(parts.next_part())
    places = [(part.seq, part.tokens, part.start, part.text) for part in written if part]
    assert places == [(0, 1, 0, ""), (1, 1, 0, "é?")] * 2 + [(2, 0, 2, "")]
    assert [part.reasoning for part in written if part] == ["Look it up.", None] * 2 + [None]
    pieces = [json.loads(part.tool_calls or "") for part in written if part]
    assert (
        pieces[0]
        == pieces[2]
        == [
            {
                "index": 0,
                "id": "call_1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"q":'},
            }
        ]
    )
    assert [piece[0]["function"]["arguments"] for piece in pieces[2:]] == ['{"q":', " 1", "}"]
    assert [part.finish_reason for part in written if part] == ["", "", "", "", "tool_calls"]
    assert AnswerParts(record({}), stream).error_part().start == 2


async def test_answer_contains_api_body_on_request() -> None:
    answer = await answered("Hel", "lo", of=pair(body=True))
    body = json.loads(answer.body or "")
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["message"]["content"] == "Hello"


async def test_answer_is_json_in_every_format() -> None:
    of = pair(schema=SCHEMA)
    answer = await answered('{"stars"', ": 5}", of=of)
    prompt = record({"text": "hi"})
    outgoing = AnswerBuilder(of, CODEC).sending(prompt, answer)
    assert (outgoing.topic, outgoing.partition, outgoing.key) == ("rows.answers", 1, b"k")
    assert dict(outgoing.headers) == PLACE | JSON
    plain = json.loads(outgoing.value or b"")
    assert set(plain) == set(Answer.__slots__)  # type: ignore[attr-defined]  # of a dataclass
    assert (plain["parsed"], plain["metadata"]) == ({"stars": 5}, {"id": 7})
    assert (plain["text"], plain["error_code"]) == ('{"stars": 5}', None)

    outgoing = AnswerBuilder(of, CODEC).sending(record(b"\xc3\x01"), answer)
    assert dict(outgoing.headers) == PLACE | AVRO
    assert CODEC.decode(outgoing.value) == answer


async def test_json_envelope_answer_has_connect_schema() -> None:
    of = pair(format="json_envelope", schema=SCHEMA)
    answer = await answered('{"stars": 5}', of=of)
    outgoing = AnswerBuilder(of, CODEC).sending(record(b"\xc3\x01", key=b"\xffk"), answer)
    whole = json.loads(outgoing.value or b"")
    fields = {field["field"]: field for field in whole["schema"]["fields"]}
    assert set(whole["payload"]) == set(fields) and whole["payload"]["key"] == r"\xffk"
    assert fields["prompt_offset"] == {"field": "prompt_offset", "type": "int64", "optional": False}
    assert fields["text"] == {"field": "text", "type": "string", "optional": True}
    assert {field["type"] for field in fields.values()} == {"int32", "int64", "string", "boolean"}
    assert whole["payload"]["parsed"] == '{"stars": 5}', "a struct has no free form"
    for name, value in whole["payload"].items():
        kind = {str: "string", int: "int", bool: "boolean"}.get(type(value), "")
        assert fields[name]["type"].startswith(kind)
        assert value is not None or fields[name]["optional"]


def test_answer_part_uses_prompt_format() -> None:
    of = pair(parts="rows.parts")
    part: AnswerPart = replace(example("trivium.AnswerPart"), tool_calls='[{"index":0}]')
    outgoing = AnswerBuilder(of, CODEC).part(record({"text": "hi"}), part)
    assert outgoing.topic == "rows.parts" and json.loads(outgoing.value or b"")["seq"] == part.seq
    assert CODEC.decode(AnswerBuilder(of, CODEC).part(record(b"\x00"), part).value) == part


@pytest.mark.parametrize("text", ["Sure! {", '{"star": 5}', "[]", '{"stars": NaN}', "[" * 9_000])
async def test_answer_builder_rejects_answer_that_breaks_schema(text: str) -> None:
    with pytest.raises(InvalidAnswer, match="expected JSON that keeps to the schema") as caught:
        await answered(text, of=pair(schema=SCHEMA))
    assert caught.value.retriable
    assert "NaN" not in text or caught.value.message.endswith(": NaN is no JSON")
    with pytest.raises(InvalidRequest) as refused:
        await answered(text, of=pair(schema=SCHEMA), finish_reason="length")
    assert (refused.value.message, refused.value.param) == (
        "max_tokens: the answer was cut off before its JSON was whole; raise it",
        "max_tokens",
    )


def prompt_with_schema(schema: Any) -> dict[str, Any]:
    """Return a prompt that sets its own response format."""
    form = {"type": "json_schema", "json_schema": {"name": "own", "schema": schema}}
    return {"text": "hi", "response_format": form}


async def test_answer_with_own_form_skips_pair_schema() -> None:
    value = {"text": "hi", "response_format": {"type": "json_object"}}
    assert (await answered("[1]", of=pair(schema=SCHEMA), value=value)).parsed == "[1]"
    with pytest.raises(InvalidAnswer):
        await answered("{", value=value)
    assert (await answered("[1]")).parsed is None, "nobody asked for JSON"


@pytest.mark.parametrize("form", ["text", "body"])
async def test_answer_is_checked_against_own_schema_of_prompt(form: str) -> None:
    """The pair's schema does not apply then."""
    value, of = (
        prompt_with_schema({"type": "array", "items": {"type": "integer"}}),
        pair(schema=SCHEMA),
    )
    if form == "body":
        messages = [{"role": "user", "content": value.pop("text")}]
        value = {"body": {"messages": messages, **value}}
    assert (await answered("[1]", of=of, value=value)).parsed == "[1]"
    for text in ('["1"]', '{"stars": 5}'):
        with pytest.raises(InvalidAnswer, match="keeps to the schema: .* is not of type"):
            await answered(text, of=of, value=value)
    with pytest.raises(InvalidRequest, match="max_tokens: the answer was cut off"):
        await answered('["1"]', of=of, value=value, finish_reason="length")


async def test_answer_builder_times_out_slow_schema_without_stall() -> None:
    """A short schema can keep a validator busy for years."""
    doubled = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]}
        for i in range(40)
    }
    slow = {"$defs": {**doubled, "a40": {"type": "string"}}, "$ref": "#/$defs/a0"}
    with pytest.raises(InvalidRequest, match="form took more than 500 ms") as caught:
        await unstalled(answered("7", value=prompt_with_schema(slow), aside_ms=500))
    assert not caught.value.retriable
    assert (await answered("7", value=prompt_with_schema({"type": "integer"}))).parsed == "7", (
        "the next one"
    )


async def test_answer_builder_checks_more_answers_than_calls_may_wait() -> None:
    """No answer is retried because others are being checked."""
    value = prompt_with_schema({"type": "integer"})
    answers = await asyncio.gather(*(answered("7", value=value) for _ in range(3 * WAITING_MAX)))
    assert all(answer.parsed == "7" for answer in answers)


async def test_answer_schema_resolves_no_remote_reference() -> None:
    value = prompt_with_schema({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(InvalidAnswer, match="Unresolvable"):
        await answered("7", value=value)


async def test_error_answer_uses_fallback() -> None:
    question = await question_of({"text": "hi", "metadata": {"id": 7}})
    of = pair(schema=SCHEMA, fallback='{"stars": 0}')
    error = WorkerLost("worker w1 fell silent \ud800" + "x" * 5_000)
    prompt = record({"text": "hi"})
    answer = AnswerBuilder(of, CODEC).error_answer(
        prompt, error, question=question, request_id="q", tries=5
    )
    assert (answer.error_code, answer.error_retriable) == ("worker_lost", True)
    assert (answer.text, answer.parsed, answer.fallback) == ('{"stars": 0}', '{"stars": 0}', True)
    assert (answer.metadata, answer.request_id, answer.tries) == ('{"id":7}', "q", 5)
    assert len(answer.error_message or "") < 3_000
    written = json.loads(AnswerBuilder(of, CODEC).sending(prompt, answer).value or b"")
    assert written["parsed"] == {"stars": 0}

    plain = AnswerBuilder(pair(), CODEC).error_answer(prompt, InvalidRequest("no text"))
    assert (plain.text, plain.fallback, plain.finish_reason) == (None, False, "")
    assert (plain.request_id, plain.asked_ms, plain.ended_ms, plain.tries) == ("", 0, 0, 0)
    text = AnswerBuilder(pair(fallback="none"), CODEC).error_answer(
        prompt, InvalidRequest("no text")
    )
    assert (text.text, text.parsed, text.fallback) == ("none", None, True)


async def test_answer_builder_shrinks_error_for_too_large_answer() -> None:
    answers = AnswerBuilder(pair(), CODEC, limits(4_000))
    answer = await answered("x" * 5_000)
    prompt = record({"text": "hi"})
    with pytest.raises(RecordTooLarge, match=r"expected at most 4000 bytes .* of rows.answers"):
        answers.sending(prompt, answer)
    failed = answers.error_answer(prompt, RecordTooLarge("too large"))
    assert answers.sending(prompt, failed).key == b"k"
    huge = record({"text": "hi"}, key=b"k" * 5_000)
    assert answers.sending(huge, failed).key == b"", "its headers tell whose it is"
    wordy = replace(failed, metadata=json.dumps({"a": "x" * 5_000}))
    assert answers.sending(prompt, wordy) == answers.sending(prompt, failed)
    fallen = replace(failed, text="x" * 5_000, parsed="x" * 5_000, fallback=True)
    brief = answers.sending(prompt, fallen)
    assert (brief.key, json.loads(brief.value or b"")["error_code"]) == (b"k", "record_too_large")
    fields = json.loads(brief.value or b"")
    assert (fields["text"], fields["fallback"], fields["error_message"]) == (
        None,
        False,
        "too large",
    )
    for message, expected in (("x" * 5_000, "x" * 200), (None, "")):
        long = answers.sending(prompt, replace(fallen, error_message=message))
        assert json.loads(long.value or b"")["error_message"] == expected
    assert [answers.sending(prompt, failed, steps=n).key for n in range(4)] == [b"k"] * 3 + [b""]
    enveloped = AnswerBuilder(pair(format="json_envelope"), CODEC, limits(6_000))
    assert enveloped.sending(huge, failed).bytes_at_most < 6_000, "the key is in there, too"


async def test_answer_builder_sends_answer_at_exact_limit() -> None:
    prompt, answer = record({"text": "hi"}), await answered("x" * 5_000)
    failed = AnswerBuilder(pair(), CODEC).error_answer(prompt, InvalidRequest("m" * 500))
    for candidate in (answer, replace(failed, metadata='{"a": 1}')):
        whole = AnswerBuilder(pair(), CODEC).sending(prompt, candidate)
        assert (
            AnswerBuilder(pair(), CODEC, limits(whole.bytes_at_most)).sending(prompt, candidate)
            == whole
        )
        if candidate.error_code:
            less = AnswerBuilder(pair(), CODEC, limits(whole.bytes_at_most - 1)).sending(
                prompt, candidate
            )
            assert json.loads(less.value or b"")["metadata"] is None


async def test_answer_with_json_form_is_parsed_without_schema() -> None:
    value = {"text": "hi", "response_format": {"type": "json_object"}}
    assert (await answered("7", value=value)).parsed == "7"
    with pytest.raises(InvalidAnswer, match="NaN is no JSON"):
        await answered("NaN", value=value)


async def test_answer_without_finish_reason_ends_with_stop() -> None:
    assert (await answered("a", finish_reason="")).finish_reason == "stop"


async def test_answer_envelope_without_key_has_null_key() -> None:
    answer = await answered("a")
    outgoing = AnswerBuilder(pair(format="json_envelope"), CODEC).sending(
        record({}, key=None), answer
    )
    assert json.loads(outgoing.value or b"")["payload"]["key"] is None


async def test_answer_check_names_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas of one tenant take turns with those of others."""
    tenants, ask = list[str](), ANSWER_PROCESS.ask

    async def note(*arguments: Any, tenant: str, **limits: Any) -> Any:
        tenants.append(tenant)
        return await ask(*arguments, tenant=tenant, **limits)

    monkeypatch.setattr(ANSWER_PROCESS, "ask", note)
    assert (await answered("7", value=prompt_with_schema({"type": "integer"}))).parsed == "7"
    assert tenants == ["rows/"]


@pytest.mark.parametrize(("key", "answer_key"), [(b"k", b"k"), (None, b"")])
def test_empty_prompt_gets_empty_answer(key: bytes | None, answer_key: bytes) -> None:
    outgoing = AnswerBuilder(pair(), CODEC).empty_answer(record(None, key=key))
    assert (outgoing.topic, outgoing.value, outgoing.key, outgoing.partition) == (
        "rows.answers",
        None,
        answer_key,
        1,
    )
    assert dict(outgoing.headers) == PLACE


async def test_avro_answer_has_registry_framing() -> None:
    codec = Codec({"Answer": 9})
    answer = await answered("a")
    outgoing = AnswerBuilder(pair(format="avro"), codec).sending(record({"text": "hi"}), answer)
    assert outgoing.value is not None and outgoing.value[:5] == b"\x00\x00\x00\x00\x09"
