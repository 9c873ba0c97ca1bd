"""Answers as records and as bytes, in every format; and those that are errors."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import InvalidAnswer, InvalidRequest, RecordTooLarge, WorkerLost
from schemas.records import Answer, AnswerPart, StreamRetrieved
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import TopicPair
from streams.gateway.request.check_process import ANSWER_PROCESS, WAITING_MAX
from tests.schemas.examples import example
from tests.stalls import unstalled
from tests.streams.bridge.samples import CODEC, KEY, asked, limits, pair, record, stream
from tests.streams.gateway.samples import MODEL

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
    """The answer to a prompt, of these tokens."""
    of = of or pair()
    value = value or {"text": "hi", "metadata": {"id": 7}}
    question = await asked(value, of)
    found = stream(*texts, retrieved=retrieved, **end)
    return await AnswerBuilder(of, CODEC, aside_ms=aside_ms).answer(
        record(value), question, KEY, found, **WHEN
    )


async def test_what_an_answer_tells() -> None:
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


async def test_citations_and_what_was_looked_up() -> None:
    found: StreamRetrieved = example("trivium.StreamRetrieved")
    answer = await answered("a", retrieved=StreamRetrieved(**{
        name: getattr(found, name) for name in ("request_id", "collection", "citations", "tokens")
    }))  # fmt: skip
    cited = json.loads(answer.citations or "")
    assert [each["document_id"] for each in cited] == [c.document_id for c in found.citations]
    assert answer.retrieved_tokens == found.tokens


async def test_the_whole_answer_of_the_api_where_that_is_asked_for() -> None:
    answer = await answered("Hel", "lo", of=pair(body=True))
    body = json.loads(answer.body or "")
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["message"]["content"] == "Hello"


async def test_json_in_every_format() -> None:
    of = pair(schema=SCHEMA)
    answer = await answered('{"stars"', ": 5}", of=of)
    prompt = record({"text": "hi"})
    sent = AnswerBuilder(of, CODEC).sending(prompt, answer)
    assert (sent.topic, sent.partition, sent.key) == ("rows.answers", 1, b"k")
    assert dict(sent.headers) == PLACE | JSON
    plain = json.loads(sent.value or b"")
    assert set(plain) == set(Answer.__slots__)  # type: ignore[attr-defined]  # of a dataclass
    assert (plain["parsed"], plain["metadata"]) == ({"stars": 5}, {"id": 7})
    assert (plain["text"], plain["error_code"]) == ('{"stars": 5}', None)

    sent = AnswerBuilder(of, CODEC).sending(record(b"\xc3\x01"), answer)
    assert dict(sent.headers) == PLACE | AVRO
    assert CODEC.decode(sent.value) == answer


async def test_json_with_its_schema_is_what_connect_reads() -> None:
    of = pair(format="json_envelope", schema=SCHEMA)
    answer = await answered('{"stars": 5}', of=of)
    sent = AnswerBuilder(of, CODEC).sending(record(b"\xc3\x01", key=b"\xffk"), answer)
    whole = json.loads(sent.value or b"")
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


def test_a_part_is_written_likewise() -> None:
    of = pair(parts="rows.parts")
    part: AnswerPart = example("trivium.AnswerPart")
    sent = AnswerBuilder(of, CODEC).part(record({"text": "hi"}), part)
    assert sent.topic == "rows.parts" and json.loads(sent.value or b"")["seq"] == part.seq
    assert CODEC.decode(AnswerBuilder(of, CODEC).part(record(b"\x00"), part).value) == part


@pytest.mark.parametrize("text", ["Sure! {", '{"star": 5}', "[]", '{"stars": NaN}', "[" * 9_000])
async def test_an_answer_that_breaks_the_schema_is_none(text: str) -> None:
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


def own(schema: Any) -> dict[str, Any]:
    """A prompt with a form of its own."""
    form = {"type": "json_schema", "json_schema": {"name": "own", "schema": schema}}
    return {"text": "hi", "response_format": form}


async def test_a_prompts_own_form_is_parsed_but_not_held_to_the_pairs_schema() -> None:
    value = {"text": "hi", "response_format": {"type": "json_object"}}
    assert (await answered("[1]", of=pair(schema=SCHEMA), value=value)).parsed == "[1]"
    with pytest.raises(InvalidAnswer):
        await answered("{", value=value)
    assert (await answered("[1]")).parsed is None, "nobody asked for JSON"


@pytest.mark.parametrize("form", ["text", "body"])
async def test_an_answer_is_held_to_its_prompts_own_schema(form: str) -> None:
    """And to no other."""
    value, of = own({"type": "array", "items": {"type": "integer"}}), pair(schema=SCHEMA)
    if form == "body":
        messages = [{"role": "user", "content": value.pop("text")}]
        value = {"body": {"messages": messages, **value}}
    assert (await answered("[1]", of=of, value=value)).parsed == "[1]"
    for text in ('["1"]', '{"stars": 5}'):
        with pytest.raises(InvalidAnswer, match="keeps to the schema: .* is not of type"):
            await answered(text, of=of, value=value)
    with pytest.raises(InvalidRequest, match="max_tokens: the answer was cut off"):
        await answered('["1"]', of=of, value=value, finish_reason="length")


async def test_a_schema_that_takes_for_ever_is_the_prompts_fault_and_stalls_nobody() -> None:
    """A few lines of a schema keep a validator busy for years."""
    doubled = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]}
        for i in range(40)
    }
    slow = {"$defs": {**doubled, "a40": {"type": "string"}}, "$ref": "#/$defs/a0"}
    with pytest.raises(InvalidRequest, match="form took more than 500 ms") as caught:
        await unstalled(answered("7", value=own(slow), aside_ms=500))
    assert not caught.value.retriable
    assert (await answered("7", value=own({"type": "integer"}))).parsed == "7", "the next one"


async def test_more_answers_are_checked_at_once_than_calls_may_wait() -> None:
    """None of them is asked again because others are being checked."""
    value = own({"type": "integer"})
    found = await asyncio.gather(*(answered("7", value=value) for _ in range(3 * WAITING_MAX)))
    assert all(each.parsed == "7" for each in found)


async def test_a_schema_leads_nowhere_else() -> None:
    value = own({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(InvalidAnswer, match="Unresolvable"):
        await answered("7", value=value)


async def test_an_error_is_an_answer() -> None:
    """With the pair's fallback."""
    question = await asked({"text": "hi", "metadata": {"id": 7}})
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


async def test_an_answer_that_its_topic_does_not_take_is_an_error() -> None:
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
    said = json.loads(brief.value or b"")
    assert (said["text"], said["fallback"], said["error_message"]) == (None, False, "too large")
    for message, told in (("x" * 5_000, "x" * 200), (None, "")):
        long = answers.sending(prompt, replace(fallen, error_message=message))
        assert json.loads(long.value or b"")["error_message"] == told
    assert [answers.sending(prompt, failed, steps=n).key for n in range(4)] == [b"k"] * 3 + [b""]
    enveloped = AnswerBuilder(pair(format="json_envelope"), CODEC, limits(6_000))
    assert enveloped.sending(huge, failed).bytes_at_most < 6_000, "the key is in there, too"


async def test_what_fits_exactly_is_sent() -> None:
    prompt, answer = record({"text": "hi"}), await answered("x" * 5_000)
    failed = AnswerBuilder(pair(), CODEC).error_answer(prompt, InvalidRequest("m" * 500))
    for made in (answer, replace(failed, metadata='{"a": 1}')):
        whole = AnswerBuilder(pair(), CODEC).sending(prompt, made)
        assert (
            AnswerBuilder(pair(), CODEC, limits(whole.bytes_at_most)).sending(prompt, made) == whole
        )
        if made.error_code:
            less = AnswerBuilder(pair(), CODEC, limits(whole.bytes_at_most - 1)).sending(
                prompt, made
            )
            assert json.loads(less.value or b"")["metadata"] is None


async def test_an_answer_without_a_schema_is_json_all_the_same() -> None:
    value = {"text": "hi", "response_format": {"type": "json_object"}}
    assert (await answered("7", value=value)).parsed == "7"
    with pytest.raises(InvalidAnswer, match="NaN is no JSON"):
        await answered("NaN", value=value)


async def test_an_end_without_a_reason_is_a_stop() -> None:
    assert (await answered("a", finish_reason="")).finish_reason == "stop"


async def test_an_envelope_without_a_key_has_none() -> None:
    answer = await answered("a")
    sent = AnswerBuilder(pair(format="json_envelope"), CODEC).sending(record({}, key=None), answer)
    assert json.loads(sent.value or b"")["payload"]["key"] is None


async def test_whose_answer_is_checked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's schemas take turns with those of others."""
    tenants, ask = list[str](), ANSWER_PROCESS.ask

    async def note(*arguments: Any, tenant: str, **limits: Any) -> Any:
        tenants.append(tenant)
        return await ask(*arguments, tenant=tenant, **limits)

    monkeypatch.setattr(ANSWER_PROCESS, "ask", note)
    assert (await answered("7", value=own({"type": "integer"}))).parsed == "7"
    assert tenants == ["rows/"]


@pytest.mark.parametrize(("key", "found"), [(b"k", b"k"), (None, b"")])
def test_an_empty_prompt_has_an_empty_answer(key: bytes | None, found: bytes) -> None:
    sent = AnswerBuilder(pair(), CODEC).empty_answer(record(None, key=key))
    assert (sent.topic, sent.value, sent.key, sent.partition) == ("rows.answers", None, found, 1)
    assert dict(sent.headers) == PLACE


async def test_confluents_framing_where_a_registry_has_the_schema() -> None:
    codec = Codec({"Answer": 9})
    answer = await answered("a")
    sent = AnswerBuilder(pair(format="avro"), codec).sending(record({"text": "hi"}), answer)
    assert sent.value is not None and sent.value[:5] == b"\x00\x00\x00\x00\x09"
