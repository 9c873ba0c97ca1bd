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
from streams.gateway.stream.event_id import ClientPosition, StreamKey, positions_text
from streams.gateway.stream.stream import Stream

DONE = b"data: [DONE]\n\n"
_NOT_FINISHED = b',"finish_reason":null}]'


class ChunkWriter:
    """Drains the streams of one answer into events."""

    def __init__(
        self,
        key: StreamKey,
        streams: Sequence[Stream],
        *,
        name: bytes = b"",
        client_positions: Sequence[ClientPosition] = (),
        prompts: Sequence[Sequence[int]] = (),
        counts_always: bool = False,
    ) -> None:
        """`name` is what all ids of this answer begin with, empty for events without ids; a
        resuming client has positions.

        `prompts`: token ids of each choice's, where they are known and told of. `counts_always`:
        every event has the usage so far, which needs them.
        """
        self._key = key
        self._chat = key.endpoint is Endpoint.CHAT
        self._streams = streams
        # What was written so far; a stream may be ahead of it while its siblings are written.
        self._written = list(client_positions) or [ClientPosition()] * len(streams)
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
        self._prompts = prompts
        self._counts_always = counts_always and bool(prompts)
        brace = b"}" if self._chat else b""
        usage = b',"usage":null' if key.include_usage else b""
        self._after_text = brace + b',"logprobs":'
        self._after_choice = usage + b"}\n\n"
        self._close = self._after_text + b"null" + _NOT_FINISHED + self._after_choice
        self._roles: dict[int, bytes] = {}  # a choice's first event, which says who speaks
        if self._chat:
            role = b'"delta":{"role":"assistant","content":""' + self._after_text + b"null"
            self._roles = {
                i: head + role for i, head in enumerate(heads) if not self._written[i].next_seq
            }
        self._untold = {  # choices whose prompt's tokens are to be told
            i for i, at in enumerate(self._written) if prompts and key.token_ids and not at.next_seq
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
        is_plain = not (stream.token_ids or stream.logprobs or self._counts_always)
        if stream.end is not None or not is_plain:
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
        if not role:
            return b""
        _, of_chunk = self._extra_fields(i)
        return self._id(self._written) + role + self._end(of_chunk)

    def _drain_one(self, i: int) -> bytes:
        stream = self._streams[i]
        if stream.is_catching_up:
            return b""
        text, token_ids, logprobs = stream.drain(), stream.token_ids, stream.logprobs
        stream.token_ids, stream.logprobs = [], []
        if self._written[i].is_ended:
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
            of_choice, of_chunk = self._extra_fields(i)
            parts = (self._opens[i], orjson.dumps(text), middle, _inner(of_choice))
            event += self._id(self._written) + b"".join(parts) + self._end(of_chunk)
        # What ended otherwise has no finish reason: an error event follows, and nothing else.
        if stream.end is not None and stream.end.kind is OutcomeKind.COMPLETED:
            event += self._role(i)  # of an answer without text
            self._written[i] = stream.position(is_ended=True)
            of_choice, of_chunk = self._extra_fields(i)
            event += self._finish(stream, stream.end, of_choice, of_chunk)
        return event

    def _extra_fields(self, i: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the next event of a choice says besides, of the choice and of all: the prompt's
        tokens, in the first, and the usage so far.
        """
        of_choice: dict[str, Any] = {}
        of_chunk: dict[str, Any] = {}
        if i in self._untold:
            self._untold.remove(i)
            (of_chunk if self._chat else of_choice)["prompt_token_ids"] = list(self._prompts[i])
        if self._counts_always:
            count = self._written[i].next_seq
            of_chunk["usage"] = answers.usage_so_far(len(self._prompts[i]), count)
        return of_choice, of_chunk

    def _end(self, of_chunk: dict[str, Any]) -> bytes:
        """What follows the log-probabilities of an event without a finish reason."""
        rest = b"}\n\n" if "usage" in of_chunk else self._after_choice
        return _NOT_FINISHED + _inner(of_chunk) + rest

    def _finish(
        self, stream: Stream, end: StreamEnd, of_choice: dict[str, Any], of_chunk: dict[str, Any]
    ) -> bytes:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        if cited := annotations(stream.retrieved, stream.next_char):
            content["delta"]["annotations"] = cited
        choice = {
            "index": stream.choice,
            **content,
            "finish_reason": end.finish_reason or "stop",
            "stop_reason": end.stop_reason or None,
            **of_choice,
        }
        placed = answers.placement(self._key, [stream])
        return self._event(choice, trivium=placed, **of_chunk)

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
            fields.setdefault("usage", None)
        return self._write({"choices": [choice], **fields})

    def _write(self, fields: dict[str, Any]) -> bytes:
        return b"%b%b,%b\n\n" % (self._id(self._written), self._head, orjson.dumps(fields)[1:])

    def _id(self, positions: Sequence[ClientPosition]) -> bytes:
        """The line before an event that lets its client resume behind it."""
        return self._prefix and b"%b%b\n" % (self._prefix, positions_text(positions))


def _inner(fields: dict[str, Any]) -> bytes:
    """Fields that follow others of an object."""
    return b"," + orjson.dumps(fields)[1:-1] if fields else b""


def whole_answer(
    key: StreamKey, streams: Sequence[Stream], prompts: Sequence[Sequence[int]] = ()
) -> bytes:
    """The body of an answer that is not streamed; every stream has ended. `prompts`: as above."""
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
        if not chat:
            content |= _prompt_fields(key, prompts, stream.choice)
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
            **(_prompt_fields(key, prompts, 0) if chat else {}),
        }
    )


def _prompt_fields(key: StreamKey, prompts: Sequence[Sequence[int]], choice: int) -> dict[str, Any]:
    """What vLLM's answers say of a prompt. Its log-probabilities are of no token here."""
    fields: dict[str, Any] = {"prompt_logprobs": None}
    if key.token_ids:
        fields["prompt_token_ids"] = list(prompts[choice]) if prompts else None
    return fields
