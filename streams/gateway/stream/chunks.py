"""Server-sent events of one answer, and the body of a whole one.

They are what OpenAI and vLLM send: `data:` lines alone, the first of a chat's choice with its role
and no text. Readers that take every line for one (`vllm bench serve`, llmperf) know nothing else.
Ids stand before them for clients that wish to resume. Everything that is the same in all chunks is
encoded once; a chunk is then a few joined byte strings around its JSON-encoded text. One event per
choice and write, however many tokens came together.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from schemas.errors import TriviumError
from schemas.records import Endpoint, OutcomeKind, StreamEnd
from streams.gateway.http.errors import error_body
from streams.gateway.stream import answers
from streams.gateway.stream.citations import annotations
from streams.gateway.stream.delivery import KEEPALIVE
from streams.gateway.stream.event_id import Position, StreamKey, positions_text
from streams.gateway.stream.stream import Stream

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Drains the streams of one answer into events."""

    def __init__(
        self,
        key: StreamKey,
        streams: Sequence[Stream],
        *,
        name: bytes = b"",
        client_positions: Sequence[Position] = (),
    ) -> None:
        """`name` is what all ids of this answer begin with, empty for events without ids; a
        resuming client has positions.
        """
        self._key = key
        self._chat = key.endpoint is Endpoint.CHAT
        self._streams = streams
        # What was written so far; a stream may be ahead of it while its siblings are written.
        self._written = list(client_positions) or [Position()] * len(streams)
        self._prefix = name and b"id: %b." % name
        self.keepalive = KEEPALIVE if name else b""
        same = {
            "id": answers.public_id(key),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": key.created_s,
            "model": key.model,
        }
        self._head = b"data: " + orjson.dumps(same)[:-1]
        field = b'"delta":{"content":' if self._chat else b'"text":'
        heads = [self._head + b',"choices":[{"index":%d,' % stream.choice for stream in streams]
        self._opens = [head + field for head in heads]
        brace = b"}" if self._chat else b""
        usage = b',"usage":null' if key.include_usage else b""
        self._after_text = brace + b',"logprobs":'
        self._after_logprobs = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._close = self._after_text + b"null" + self._after_logprobs
        self._roles: dict[int, bytes] = {}  # a choice's first event, which says who speaks
        if self._chat:
            role = b'"delta":{"role":"assistant","content":""' + self._close
            self._roles = {
                i: head + role for i, head in enumerate(heads) if not self._written[i].next_seq
            }
        self.collected: list[str] | None = None  # a list takes the first choice's text

    def opening(self) -> bytes:
        """Nothing: what fails before the first token has a status of its own."""
        return b""

    def drain(self) -> bytes:
        """Everything new, and the ends; empty where nothing is."""
        if len(self._streams) > 1:
            return b"".join([self._drain_one(i) for i in range(len(self._streams))])
        stream = self._streams[0]
        if stream.end is not None or stream.token_ids or stream.logprobs:
            return self._drain_one(0)
        if not stream.texts or not (text := stream.drain()):
            return b""
        if self.collected is not None:
            self.collected.append(text)
        event = self._opens[0] + orjson.dumps(text) + self._close
        if self._prefix:  # a single choice's position is that of its stream
            position = (stream.next_seq, stream.next_char, stream.digest)
            event = b"%b%d-%d-%x\n%b" % (self._prefix, *position, event)
        return self._role(0) + event if self._roles else event

    def _role(self, i: int) -> bytes:
        """The first event of a choice of a chat; empty where it was written."""
        role = self._roles.pop(i, b"")
        return role and self._id(self._written) + role

    def _drain_one(self, i: int) -> bytes:
        stream = self._streams[i]
        if stream.is_catching_up:
            return b""
        text, token_ids, logprobs = stream.drain(), stream.token_ids, stream.logprobs
        stream.token_ids, stream.logprobs = [], []
        if self._written[i].ended:
            return b""
        if self.collected is not None and not i:
            self.collected.append(text)
        event = b""
        if text or logprobs or token_ids:
            event = self._role(i)
            self._written[i] = stream.position()
            form = answers.logprobs(self._key, logprobs, stream.next_char - len(text))
            middle = self._after_text + orjson.dumps(form)
            if self._key.token_ids:
                middle += b',"token_ids":' + orjson.dumps(token_ids)
            parts = (self._opens[i], orjson.dumps(text), middle, self._after_logprobs)
            event += self._id(self._written) + b"".join(parts)
        # What ended otherwise has no finish reason: an error event follows, and nothing else.
        if stream.end is not None and stream.end.kind is OutcomeKind.COMPLETED:
            event += self._role(i)  # of an answer without text
            self._written[i] = stream.position(ended=True)
            event += self._finish(stream, stream.end)
        return event

    def _finish(self, stream: Stream, end: StreamEnd) -> bytes:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        if cited := annotations(stream.retrieved, stream.next_char):
            content["delta"]["annotations"] = cited
        choice = {
            "index": stream.choice,
            **content,
            "finish_reason": end.finish_reason or "stop",
            "stop_reason": end.stop_reason or None,
        }
        return self._event(choice, trivium=answers.placement(self._key, [stream]))

    def failing(self, error: TriviumError) -> bytes:
        """The error; nothing follows it."""
        return b"data: %b\n\n" % error_body(error)

    def closing(self) -> bytes:
        """Usage where it was asked for, and the last line."""
        if not self._key.include_usage:
            return DONE
        fields: dict[str, Any] = {
            "choices": [],
            "usage": answers.usage(self._streams, self._key.prompts),
        }
        fields["trivium"] = answers.placement(self._key, self._streams)
        return self._write(fields) + DONE

    def _event(self, choice: dict[str, Any], **fields: Any) -> bytes:
        choice.setdefault("logprobs", None)
        choice.setdefault("finish_reason", None)
        if self._key.include_usage:
            fields["usage"] = None
        return self._write({"choices": [choice], **fields})

    def _write(self, fields: dict[str, Any]) -> bytes:
        return b"%b%b,%b\n\n" % (self._id(self._written), self._head, orjson.dumps(fields)[1:])

    def _id(self, positions: Sequence[Position]) -> bytes:
        """The line before an event that lets its client resume behind it."""
        return self._prefix and b"%b%b\n" % (self._prefix, positions_text(positions))


def whole_answer(key: StreamKey, streams: Sequence[Stream]) -> bytes:
    """The body of an answer that is not streamed; every stream has ended."""
    chat = key.endpoint is Endpoint.CHAT
    choices = []
    for stream in streams:
        end = stream.end
        assert end is not None
        text = "".join(stream.texts)
        content: dict[str, Any]
        if chat:
            content = {"message": {"role": "assistant", "content": text}}
            if cited := annotations(stream.retrieved, len(text)):
                content["message"]["annotations"] = cited
        else:
            content = {"text": text}
        if key.token_ids:
            content["token_ids"] = stream.token_ids
        choices.append(
            {
                "index": stream.choice,
                **content,
                "logprobs": answers.logprobs(key, stream.logprobs, 0),
                "finish_reason": end.finish_reason or "stop",
                "stop_reason": end.stop_reason or None,
            }
        )
    return orjson.dumps(
        {
            "id": answers.public_id(key),
            "object": "chat.completion" if chat else "text_completion",
            "created": key.created_s,
            "model": key.model,
            "choices": choices,
            "usage": answers.usage(streams, key.prompts),
            "trivium": answers.placement(key, streams),
        }
    )
