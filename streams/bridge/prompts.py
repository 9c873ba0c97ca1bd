"""Parses a record on a topic of prompts: returns a question, or raises an error with advice.

`streams/bridge/records/record.py` decodes the value. The pair's settings apply to fields that a
prompt does not set. Only `WriterSchemas` does I/O, once per schema id.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from schemas.codec import SINGLE_OBJECT_MARKER, Codec, schema_of, to_dict
from schemas.errors import BodyTooLarge, InvalidRequest, RecordError
from schemas.records import Priority
from schemas.topics import live_ms_max
from streams.anthropic.body import MessagesBody
from streams.bridge.calls import CallBody, check_call
from streams.bridge.config import TopicPair
from streams.bridge.records import exact_json
from streams.bridge.records.record import PromptRecord, fetch_schema, fields_of
from streams.bridge.records.template import Template, look_up
from streams.bridge.records.writer_schemas import READS_MAX, WriterSchemas
from streams.calls.config import BY_URGENCY
from streams.calls.embedding import EmbeddingsBody
from streams.calls.errors import shorten
from streams.calls.ids import check_session_id
from streams.calls.request.body import ChatBody, Message, ResponseFormat
from streams.openai.batches.lines import EMBEDDINGS
from streams.openai.responses.call import ResponseCall

VALUE_BYTES_MAX = 4 << 20  # the limit of a call's body
LIST_MAX = 16_384  # messages or stop strings
METADATA_CHARS_MAX = 65_536
FIELDS = tuple(field["name"] for field in schema_of("Prompt")["fields"])
_QUESTIONS = ("text", "messages", "body")
_BESIDE_A_BODY = frozenset(("body", "endpoint", "priority", "deadline_ms", "metadata"))
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "stop")
_SYSTEM = ("system", "developer")
_OF_CALLS = ("tool_calls", "tool_call_id", "reasoning")  # of a message

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQuestion:
    """The question of a prompt, checked like a call's body; `take_in_body` checks the rest."""

    body: CallBody
    session_id: str  # empty: a conversation of its own
    priority: Priority
    deadline_ms: int  # from its first try
    metadata: str | None  # a JSON object, for the answer
    wants_json: bool  # the answer must be a JSON value
    schema: str  # JSON schema of that value, the prompt's own or the pair's; empty for any
    response: ResponseCall | None = None  # the /v1/responses call that the body answers
    message: MessagesBody | None = None  # likewise, of /v1/messages


def answer_format(pair: TopicPair, record: PromptRecord) -> str:
    """Return json, json_envelope or avro: the pair's setting, or the format of the prompt."""
    if pair.format != "prompt":
        return pair.format
    return "avro" if record.is_avro else "json"


class PromptParser:
    """Parses the prompts of one pair."""

    def __init__(
        self,
        pair: TopicPair,
        default: str,
        codec: Codec,
        schemas: WriterSchemas,
        *,
        priority_max: str = Priority.INTERACTIVE,
    ) -> None:
        """Create one; `default` is the model of prompts that name none, `priority_max` the most
        urgent priority of any caller. Pairs may share `schemas`.
        """
        bounds = (Priority(name) for name in (pair.priority_max, priority_max))
        self._priorities = BY_URGENCY[max(map(BY_URGENCY.index, bounds)) :]
        self._pair, self._default, self._codec, self._schemas = pair, default, codec, schemas
        self._template = Template(pair.template) if pair.template else None
        self._tools: list[Any] | None = orjson.loads(pair.tools) if pair.tools else None
        schema = orjson.loads(pair.schema) if pair.schema else None
        self._form = schema and {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        }

    async def question(self, record: PromptRecord) -> PromptQuestion | None:
        """Return a record's question; None for a record that deletes. Raises TriviumError, a
        retriable one if only the schema registry is unavailable.
        """
        fields = await self._fields(record)
        if fields is None:
            return None
        if self._template is not None:
            text = self._template.fill(fields)
            metadata = {path: look_up(path, fields) for path in self._pair.metadata}
            fields = {"text": text, "metadata": exact_json.dumps(metadata) if metadata else None}
        for name, value in fields.items():
            if name not in FIELDS:
                raise InvalidRequest(
                    f"{name[:80]}: unknown field; expected one of {', '.join(FIELDS)}", name
                )
            if isinstance(value, list | tuple) and len(value) > LIST_MAX:
                raise InvalidRequest(
                    f"{name}: expected at most {LIST_MAX} of them, found {len(value)}", name
                )
        return self._question({name: value for name, value in fields.items() if _is_set(value)})

    async def fetch_schema(self, record: PromptRecord) -> None:
        """Fetch the record's schema, so that `question` need not; that reports errors in the value.

        Raises BrokerUnavailable if the registry is unavailable for long.
        """
        with suppress(RecordError):
            await fetch_schema(record, self._schemas)

    async def _fields(self, record: PromptRecord) -> Json | None:
        value = record.value or b""
        if len(value) > VALUE_BYTES_MAX:
            raise BodyTooLarge(
                f"the value: expected at most {VALUE_BYTES_MAX} bytes, found {len(value)}"
            )
        if value[:2] == SINGLE_OBJECT_MARKER and not record.names_schema:
            return to_dict(self._codec.decode(value, reads_max=READS_MAX))
        return await fields_of(record, self._schemas)

    def _question(self, fields: Json) -> PromptQuestion:
        questions = [name for name in _QUESTIONS if name in fields]
        if len(questions) != 1:
            names = " and ".join(questions) or "none"
            raise InvalidRequest(f"expected one of {', '.join(_QUESTIONS)}, found {names}")
        body = _own_body(fields) if "body" in fields else self._body(fields)
        is_embedding = fields.get("endpoint") == EMBEDDINGS
        if not is_embedding:  # of another kind of model
            body.setdefault("model", self._pair.model or self._default)
        priority = self._capped(_priority(fields, body) or Priority(self._pair.priority))
        if not is_embedding:
            body.pop("priority", None)  # the question has the capped priority
        call = check_call(body, fields.get("endpoint", ""))
        if isinstance(call.body, ChatBody) and "body" not in fields:
            self._put_system_first(call.body.messages)
        form = None
        if not isinstance(call.body, EmbeddingsBody):
            form = call.body.response_format
        return PromptQuestion(
            body=call.body,
            response=call.response,
            message=call.message,
            session_id=_session(fields),
            priority=priority,
            deadline_ms=_deadline(fields, self._pair.deadline_ms),
            metadata=_metadata(fields.get("metadata")),
            wants_json=form is not None and form.type != "text",
            schema=_schema(form),
        )

    def _capped(self, priority: Priority) -> Priority:
        """Return the priority, or the most urgent allowed class if it is too urgent."""
        return priority if priority in self._priorities else self._priorities[0]

    def _body(self, fields: Json) -> Json:
        if "endpoint" in fields:
            raise InvalidRequest(
                "endpoint: expected none but beside body; leave it out", "endpoint"
            )
        pair = self._pair
        if "text" in fields:
            messages = [{"role": "user", "content": _text("text", fields["text"])}]
        else:
            messages = _messages(exact_json.nearest(fields["messages"]))
        body = {"messages": messages}
        if "model" in fields:
            body["model"] = fields["model"]
        for name in _SAMPLING:
            value = exact_json.nearest(fields.get(name, getattr(pair, name)))
            if _is_set(value):
                body[name] = list(value) if isinstance(value, tuple) else value
        form = _object("response_format", fields.get("response_format")) or self._form
        retrieval = _retrieval(fields.get("retrieval")) or pair.retrieval
        tools, choice = self._tools, pair.tool_choice or None
        if "tools" in fields:
            tools, choice = _objects("tools", fields["tools"]), None
        choice = _tool_choice(fields.get("tool_choice", choice))
        optional = {
            "response_format": form,
            "retrieval": retrieval,
            "tools": tools,
            "tool_choice": choice,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    def _put_system_first(self, messages: list[Message]) -> None:
        """Insert the pair's system message if there is none; after the check, whose errors number
        the messages as sent."""
        if self._pair.system and not any(message.role in _SYSTEM for message in messages):
            messages.insert(0, Message(role="system", content=self._pair.system))


def _is_set(value: Any) -> bool:
    """Return whether a field is set; Avro has empty values for unset fields, and JSON may."""
    return value is not None and value not in ("", [], ())


def _load_object(name: str, text: str) -> Json:
    try:
        value = exact_json.loads(text.encode())
    except ValueError as error:
        raise InvalidRequest(f"{name}: expected a JSON object: {error}", name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: expected a JSON object, found {shorten(value)}", name)
    return value


def _exact_object(name: str, value: Any) -> Json | None:
    """Return an object field, which is JSON text in Avro; its numbers keep their digits."""
    if value is None or isinstance(value, dict):
        return value
    return _load_object(name, _text(name, value))


def _object(name: str, value: Any) -> Json | None:
    """Return the field as an object with ordinary numbers."""
    rounded: Json | None = exact_json.nearest(_exact_object(name, value))
    return rounded


def _objects(name: str, value: Any) -> list[Any]:
    """Return a list field, which is JSON text in Avro, with ordinary numbers."""
    objects = value
    if isinstance(value, str):
        try:
            objects = exact_json.loads(value.encode())
        except ValueError as error:
            raise InvalidRequest(f"{name}: expected a JSON list: {error}", name) from error
    if not isinstance(objects, list | tuple):
        raise InvalidRequest(f"{name}: expected a JSON list, found {shorten(objects)}", name)
    rounded: list[Any] = exact_json.nearest(list(objects))
    return rounded


def _tool_choice(value: Any) -> Any:
    is_object = isinstance(value, dict) or (isinstance(value, str) and value.lstrip()[:1] == "{")
    return _object("tool_choice", value) if is_object else value


def _messages(value: Any) -> Any:
    """Return messages as chats have them. In Avro their tool calls are JSON texts, and unset fields
    are empty."""
    if not isinstance(value, list | tuple):
        return value
    return [
        _message(message, f"messages.{i}") if isinstance(message, dict) else message
        for i, message in enumerate(value)
    ]


def _message(message: Json, where: str) -> Json:
    fields = {
        name: value for name, value in message.items() if name not in _OF_CALLS or _is_set(value)
    }
    if isinstance(calls := fields.get("tool_calls"), str):
        fields["tool_calls"] = _objects(f"{where}.tool_calls", calls)
    return fields


def _retrieval(value: Any) -> Json | None:
    """Return the retrieval field. A filter whose digits no float has stays text, and is refused
    later."""
    exact, rounded = _exact_object("retrieval", value), _object("retrieval", value)
    if exact and rounded and exact.get("filter") != rounded.get("filter"):
        rounded["filter"] = exact_json.dumps(exact["filter"])
    return rounded


def _dump_json(name: str, value: Json) -> str:
    try:
        return exact_json.dumps(value)
    except TypeError as error:
        raise InvalidRequest(f"{name}: cannot be written as JSON: {error}", name) from error


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name}: expected a text, found {shorten(value)}", name)
    return value


def _own_body(fields: Json) -> Json:
    for name in fields:
        if name not in _BESIDE_A_BODY:
            raise InvalidRequest(f"{name}: expected none beside body; put it there", name)
    return _object("body", fields["body"]) or {}


def _schema(form: ResponseFormat | None) -> str:
    if form is None or form.type != "json_schema" or form.json_schema is None:
        return ""
    return _dump_json("response_format", form.json_schema.json_schema or {})


def _session(fields: Json) -> str:
    if "session_id" not in fields:
        return ""
    return check_session_id("session_id", _text("session_id", fields["session_id"]))


def _priority(*sources: Json) -> Priority | None:
    """Return the first priority that is set; vLLM's default number 0 does not count."""
    for value in (source.get("priority") for source in sources):
        if value in (None, "", 0):
            continue
        if value not in list(Priority):
            raise InvalidRequest(
                f"priority: expected one of {', '.join(Priority)}, found {shorten(value)}",
                "priority",
            )
        return Priority(value)
    return None


def _deadline(fields: Json, usual_ms: int) -> int:
    value = exact_json.nearest(fields.get("deadline_ms", usual_ms))
    if isinstance(value, float) and value.is_integer():  # some producers write only floats
        value = int(value)
    if type(value) is not int or not 0 < value <= live_ms_max():
        raise InvalidRequest(
            f"deadline_ms: expected a whole number from 1 to {live_ms_max()}, found "
            f"{shorten(value)}",
            "deadline_ms",
        )
    return value


def _metadata(value: Any) -> str | None:
    metadata = _exact_object("metadata", value)
    if metadata is None:
        return None
    text = _dump_json("metadata", metadata)
    if len(text) > METADATA_CHARS_MAX:
        raise InvalidRequest(
            f"metadata: expected at most {METADATA_CHARS_MAX} characters, found {len(text)}",
            "metadata",
        )
    return text
