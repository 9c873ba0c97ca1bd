"""Builds the one answer to a prompt, and encodes it: as Avro, JSON, or JSON with its schema.

An answer that lacks the requested form, or is larger than its topic's limit, becomes an error.
Errors are answers too, with the pair's fallback as their text. Pure, except that a separate process
checks whether an answer matches its schema: prompts bring schemas of their own, and some would keep
a validator busy for years.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import orjson

from schemas.codec import Codec, full_schema, to_dict
from schemas.errors import InvalidAnswer, InvalidRequest, RecordTooLarge, TriviumError
from schemas.records import Answer, AnswerDelta, AnswerPart
from streams.bridge.config import TopicPair
from streams.bridge.limits import TopicLimits
from streams.bridge.prompts import PromptQuestion, answer_format
from streams.bridge.records.record import PromptRecord
from streams.calls.request.check_process import ANSWER_PROCESS, CHECK_MS
from streams.calls.stream import answers, citations
from streams.calls.stream.chunks import whole_answer
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.parsed import Json, answer_of, chat_deltas
from streams.calls.stream.stream import Stream
from streams.log.clients import Headers
from streams.log.clock import wall_ms
from streams.log.retrieval.embedding import EmbeddedTexts
from streams.log.transactions import OutgoingRecord

HEADERS = "trivium-prompt-"  # prefix of the headers with the prompt's position
ERROR_STEPS = 3  # steps in which an error is made smaller
_BRIEF_CHARS = 200
# Fields of an Answer with JSON text
_JSON = frozenset(("parsed", "tool_calls", "citations", "metadata", "body"))
_CONNECT_TYPES = {"int": "int32", "long": "int64"}


class AnswerBuilder:
    """Builds the answer records of one pair, and encodes them."""

    def __init__(
        self,
        pair: TopicPair,
        codec: Codec,
        limits: TopicLimits | None = None,
        *,
        aside_ms: int = CHECK_MS,
        names_reasoning_content: bool = False,
    ) -> None:
        """Create one; `limits` has the limits of topics, `aside_ms` is the timeout of the check
        whether an answer matches its schema. With `names_reasoning_content`, the reasoning in
        bodies of chats is in `reasoning_content`, too.
        """
        self._names_reasoning_content = names_reasoning_content
        self._pair, self._codec = pair, codec
        self._limits, self._aside_ms = limits or TopicLimits(), aside_ms

    async def answer(
        self,
        record: PromptRecord,
        question: PromptQuestion,
        key: StreamKey,
        stream: Stream,
        *,
        asked_ms: int,
        first_token_ms: int,
        ended_ms: int,
        tries: int,
    ) -> Answer:
        """Return the answer of a completed stream. Raises InvalidAnswer (retriable) if it lacks the
        requested form, and InvalidRequest if `max_tokens` cut it off or the check takes too long.
        """
        end = stream.end
        assert end is not None
        answer, owner = answer_of(stream), f"{record.topic}/{key.tenant}"
        finish_reason = end.finish_reason or "stop"
        parsed = None
        if not answer.calls:  # the form binds only an answer without a call
            parsed = await self._parsed(answer.content, question, finish_reason, owner)
        body = None
        if self._pair.body:
            names_both = self._names_reasoning_content
            body = whole_answer(key, [stream], names_reasoning_content=names_both).decode()
        usage = answers.usage([stream], 1)
        passages = citations.retrieval(stream.retrieved)["citations"] if stream.retrieved else None
        return replace(
            self._about(record, question),
            request_id=end.request_id,
            text=answer.content,
            parsed=parsed,
            tool_calls=_calls_text([call.to_json() for call in answer.calls.values()]),
            reasoning=answer.reasoning or None,
            finish_reason=finish_reason,
            model=key.model,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=end.cached_tokens,
            retrieved_tokens=usage["prompt_tokens_details"].get("retrieved_tokens", 0),
            completion_tokens=usage["completion_tokens"],
            reasoning_tokens=end.reasoning_tokens,
            citations=None if passages is None else orjson.dumps(passages).decode(),
            asked_ms=asked_ms,
            first_token_ms=first_token_ms,
            ended_ms=ended_ms,
            tries=tries,
            body=body,
        )

    def embeddings_answer(
        self,
        record: PromptRecord,
        question: PromptQuestion,
        embeddings: EmbeddedTexts,
        body: bytes,
        *,
        asked_ms: int,
        tries: int,
    ) -> Answer:
        """Return the answer to an embeddings call: a body without text."""
        return replace(
            self._about(record, question),
            model=embeddings.embedder,
            prompt_tokens=embeddings.tokens,
            asked_ms=asked_ms,
            ended_ms=wall_ms(),
            tries=tries,
            body=body.decode(),
        )

    def error_answer(
        self,
        record: PromptRecord,
        error: TriviumError,
        *,
        question: PromptQuestion | None = None,
        request_id: str = "",
        asked_ms: int = 0,
        ended_ms: int = 0,
        tries: int = 0,
    ) -> Answer:
        """Return the error answer to a prompt that is not tried again."""
        wire, fallback = error.to_wire(), self._pair.fallback
        return replace(
            self._about(record, question),
            request_id=request_id,
            text=fallback,
            parsed=fallback if self._pair.schema else None,
            asked_ms=asked_ms,
            ended_ms=ended_ms,
            tries=tries,
            error_code=wire.code,
            error_message=wire.message,
            error_retriable=wire.retriable,
            fallback=fallback is not None,
        )

    def sending(self, record: PromptRecord, answer: Answer, *, steps: int = 0) -> OutgoingRecord:
        """Return the record to commit; raises RecordTooLarge, but not for an error answer.

        An error is made smaller until it fits: first without its metadata, then without its
        fallback and with a short message, then without its key. The first `steps` of these steps
        are taken in any case.
        """
        form, topic = answer_format(self._pair, record), self._pair.answers
        bytes_max = self._limits.of(topic)
        sending = self._sending(record, answer, form, topic)
        if sending.bytes_at_most > bytes_max and answer.error_code is None:
            raise RecordTooLarge(
                f"the answer: expected at most {bytes_max} bytes with key and headers, found "
                f"{sending.bytes_at_most}; ask for less, or raise max.message.bytes of {topic}"
            )
        for step in range(ERROR_STEPS):
            if step >= steps and sending.bytes_at_most <= bytes_max:
                break
            if step == 0:
                answer = replace(answer, metadata=None)
            elif step == 1:
                brief = (answer.error_message or "")[:_BRIEF_CHARS]
                answer = replace(
                    answer, text=None, parsed=None, fallback=False, error_message=brief
                )
            else:
                record = replace(record, key=b"")
            sending = self._sending(record, answer, form, topic)
        return sending

    def empty_answer(self, record: PromptRecord) -> OutgoingRecord:
        """Return the answer to an empty prompt: an empty value under its key."""
        return OutgoingRecord(
            topic=self._pair.answers,
            partition=record.partition,
            key=record.key or b"",  # the client refuses a record without key and value
            value=None,
            headers=_origin(record),
        )

    def part(self, record: PromptRecord, part: AnswerPart) -> OutgoingRecord:
        """Return the record of a part of an answer's text, on the pair's topic of parts."""
        return self._sending(record, part, answer_format(self._pair, record), self._pair.parts)

    def _about(self, record: PromptRecord, question: PromptQuestion | None) -> Answer:
        return Answer(
            prompt_topic=record.topic,
            prompt_partition=record.partition,
            prompt_offset=record.offset,
            prompt_ms=record.timestamp_ms,
            metadata=question.metadata if question else None,
        )

    async def _parsed(
        self, text: str, question: PromptQuestion, finish_reason: str, owner: str
    ) -> str | None:
        """Return the text unchanged if it is a JSON value of the requested schema; None if no JSON
        was requested."""
        if not question.wants_json:
            return None
        if (
            why := await self._schema_error(text, question.schema, owner)
        ) and finish_reason == "length":
            raise InvalidRequest(
                "max_tokens: the answer was cut off before its JSON was whole; raise it",
                "max_tokens",
            )
        if why:
            raise InvalidAnswer(f"expected JSON that keeps to the schema: {why}")
        return text

    async def _schema_error(self, text: str, schema: str, owner: str) -> str:
        try:
            json.loads(text, parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            return str(error)
        if not schema:
            return ""
        # Slots bound the number of waiting checks, so none is refused because others wait.
        ask, waiting_max = ANSWER_PROCESS.ask, sys.maxsize
        limits = {"limit_ms": self._aside_ms, "waiting_max": waiting_max}
        return str(await ask("breaks", schema, text, tenant=owner, **limits))

    def _sending(self, record: PromptRecord, value: Any, form: str, topic: str) -> OutgoingRecord:
        content_type = "avro/binary" if form == "avro" else "application/json"
        return OutgoingRecord(
            topic=topic,
            partition=record.partition,
            key=record.key,
            value=self._encoded(record, value, form),
            headers=(*_origin(record), ("content-type", content_type.encode())),
        )

    def _encoded(self, record: PromptRecord, value: Any, form: str) -> bytes:
        if form == "avro":
            return self._codec.encode(value)
        fields = to_dict(value)
        if form == "json":
            return orjson.dumps({name: _as_json(name, field) for name, field in fields.items()})
        key = None if record.key is None else record.key.decode(errors="backslashreplace")
        schema = _connect_schema(type(value).__name__)
        return orjson.dumps({"schema": schema, "payload": {"key": key, **fields}})


def _calls_text(calls: Sequence[Json]) -> str | None:
    return orjson.dumps(calls).decode() if calls else None


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _origin(record: PromptRecord) -> Headers:
    places = (("topic", record.topic), ("partition", record.partition), ("offset", record.offset))
    return tuple((HEADERS + name, str(value).encode()) for name, value in places)


class AnswerParts:
    """Makes the parts of one answer, each with what is new since the last one.

    After a restart of its stream, the parts begin at 0 again.
    """

    def __init__(self, record: PromptRecord, stream: Stream) -> None:
        self._record, self._stream = record, stream
        self._restarts = self._seq = self._start = self._deltas = 0

    def next_part(self) -> AnswerPart | None:
        """Return the next part; None if nothing is new."""
        stream = self._stream
        if stream.restart_count != self._restarts:
            self._restarts, self._seq, self._start, self._deltas = stream.restart_count, 0, 0, 0
        end, tokens = stream.end, stream.next_seq - self._seq
        if end is None and tokens <= 0:
            return None
        fields: Json = {}
        text = "".join(stream.texts)[self._start :]
        if deltas := stream.deltas[self._deltas :]:
            fields = _new_fields(deltas)
            text = fields.pop("text")
        part = self._part(
            seq=self._seq,
            tokens=tokens,
            start=self._start,
            text=text,
            finish_reason="" if end is None else end.finish_reason or "stop",
            **fields,
        )
        self._seq, self._start = stream.next_seq, self._start + len(text)
        self._deltas = len(stream.deltas)
        return part

    def error_part(self) -> AnswerPart:
        """Return the last part of an answer that failed."""
        stream = self._stream
        start = len(answer_of(stream).content) if stream.deltas else stream.next_char
        return self._part(
            seq=stream.next_seq, tokens=0, start=start, text="", finish_reason="error"
        )

    def _part(self, **fields: Any) -> AnswerPart:
        return AnswerPart(
            prompt_topic=self._record.topic,
            prompt_partition=self._record.partition,
            prompt_offset=self._record.offset,
            request_id=self._stream.request_id,
            **fields,
        )


def _new_fields(deltas: Sequence[AnswerDelta]) -> Json:
    """Return the fields of a part for some deltas of a parsed answer."""
    text, reasoning, calls = "", "", list[Json]()
    for _, delta in chat_deltas(deltas, names_reasoning_content=False):
        text += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        calls += delta.get("tool_calls", ())
    return {"text": text, "reasoning": reasoning or None, "tool_calls": _calls_text(calls)}


def _as_json(name: str, value: Any) -> Any:
    return orjson.Fragment(value) if name in _JSON and value is not None else value


@cache
def _connect_schema(name: str) -> dict[str, Any]:
    """Return a record's schema for Connect's JSON converter; `key` is the record's key as text."""
    fields = [{"field": "key", "type": "string", "optional": True}]
    for field in full_schema(name)["fields"]:
        kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
        connect = _CONNECT_TYPES.get(kinds[-1], kinds[-1])
        fields.append({"field": field["name"], "type": connect, "optional": "null" in kinds})
    return {"type": "struct", "name": f"trivium.{name}", "optional": False, "fields": fields}
