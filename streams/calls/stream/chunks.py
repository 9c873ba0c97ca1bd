"""Server-sent events of one answer, and the body of a whole one.

Events have the form of OpenAI's and vLLM's: `data:` lines only, and the first event of a chat's
choice has its role and no text. Some readers take every line for a `data:` line (`vllm bench
serve`, llmperf), so only clients that want to resume get `id:` lines before the events. Fields that
are equal in all chunks are encoded once; a chunk then joins a few byte strings around its
JSON-encoded text. Each write has one event per choice, however many tokens came together.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from schemas.errors import TriviumError
from schemas.records import AnswerDelta, Endpoint, OutcomeKind, StreamEnd
from streams.calls.errors import error_body
from streams.calls.stream import answers
from streams.calls.stream.citations import annotations
from streams.calls.stream.event_id import ClientPosition, StreamKey, positions_text
from streams.calls.stream.parsed import ParsedAnswer, answer_of, chat_deltas
from streams.calls.stream.stream import Stream

DONE = b"data: [DONE]\n\n"
# Only for clients that asked for event ids: readers of benchmarks take a comment for JSON. No blank
# line follows: it would end an event, and `openai` then makes one without data (in Go always, in
# Python once events have had ids).
KEEPALIVE = b": keep-alive\n"
# JSON may contain these unescaped, but Python's `str.splitlines`, which `httpx` and packages based
# on it use, ends a line at each.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
_NOT_FINISHED = b',"finish_reason":null}]'


def one_line_each(events: bytes) -> bytes:
    """Escape the characters in JSON that some clients take for the end of a line."""
    if not events.isascii():
        for end, escape in _LINE_ENDS:
            events = events.replace(end, escape)
    return events


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
        names_reasoning_content: bool = False,
        echoes: Sequence[str] = (),
    ) -> None:
        """Set up a writer. `name` is the common prefix of all event ids, or empty for events
        without ids. `client_positions` are those of a client that resumes.

        `prompts`: the token ids of each choice's prompt, if the answer reports them.
        `counts_always`: every event has the usage so far, which needs `prompts`.
        `names_reasoning_content`: reasoning is also in the field that older clients read.
        `echoes`: texts of completions' prompts, one per choice, which the first events have. A
        client that resumes after an event has them.
        """
        self._key = key
        self._chat = key.endpoint is Endpoint.CHAT
        self._streams = streams
        # The written positions; a stream may be ahead of its own while its siblings are written.
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
        self._heads, self._opens = heads, [head + field for head in heads]
        self._names_reasoning_content = names_reasoning_content
        self._prompts = prompts
        self._counts_always = counts_always and bool(prompts)
        brace = b"}" if self._chat else b""
        usage = b',"usage":null' if key.include_usage else b""
        self._after_text = brace + b',"logprobs":'
        self._after_choice = usage + b"}\n\n"
        self._close = self._after_text + b"null" + _NOT_FINISHED + self._after_choice
        # By choice: its first event, with the role, or with the text of a completion's prompt.
        self._roles = {
            i: heads[i] + field + orjson.dumps(echo) + self._after_text + b"null"
            for i, echo in enumerate(echoes)
        }
        self._has_echoes = bool(echoes)
        if self._chat:
            role = b'"delta":{"role":"assistant","content":""' + self._after_text + b"null"
            self._roles = {
                i: head + role for i, head in enumerate(heads) if not self._written[i].next_seq
            }
        self._untold = {  # choices whose prompt's token ids were not written yet
            i for i, at in enumerate(self._written) if prompts and key.token_ids and not at.next_seq
        }
        self.collected: ParsedAnswer | None = None  # if set: collects the first choice

    def opening(self) -> bytes:
        """Return nothing: an error before the first token has its own HTTP status."""
        return b""

    def drain(self) -> bytes:
        """Return all new events, ends included; empty if there are none."""
        if len(self._streams) > 1:
            return b"".join([self._drain_one(i) for i in range(len(self._streams))])
        stream = self._streams[0]
        is_plain = not (stream.token_ids or stream.logprobs or stream.deltas or self._counts_always)
        if stream.end is not None or not is_plain:
            return self._drain_one(0)
        if not stream.texts or not (text := stream.drain()):
            return b""
        if self.collected is not None:
            self.collected.content += text
        event = self._opens[0] + orjson.dumps(text) + self._close
        if self._prefix:  # the position of a single choice is that of its stream
            position = (stream.next_seq, stream.next_char, stream.digest)
            event = b"%b%d-%d-%x\n%b" % (self._prefix, *position, event)
        return self._role(0) + event if self._roles else event

    def _role(self, i: int) -> bytes:
        """Return the first event of a choice; empty if it was written.

        Choices with echoes have their first events together, of which the last alone has an id. So
        a client that resumes, at a gateway without the prompts, has all echoes.
        """
        if i not in self._roles:
            return b""
        choices = list(self._roles) if self._has_echoes else [i]
        events = []
        for choice in choices:
            role = self._roles.pop(choice)
            of_choice, of_chunk = self._extra_fields(choice)
            name = self._id(self._written) if choice == choices[-1] else b""
            events.append(name + role + _inner(of_choice) + self._end(of_chunk))
        return b"".join(events)

    def _drain_one(self, i: int) -> bytes:
        stream = self._streams[i]
        if stream.is_catching_up:
            return b""
        text, token_ids, logprobs = stream.drain(), stream.token_ids, stream.logprobs
        deltas = stream.deltas
        stream.token_ids, stream.logprobs, stream.deltas = [], [], []
        if self._written[i].is_ended:
            return b""
        if self.collected is not None and not i:
            self.collected.content += text
            self.collected.add(deltas)
        event = b""
        if text or logprobs or token_ids or deltas:
            event = self._role(i)
            parsed_parts = self._parsed_parts(deltas)
            for seq, delta in parsed_parts[:-1]:
                self._written[i] = stream.position_after(seq)
                event += self._id(self._written) + self._heads[i] + delta + self._close
            content = self._opens[i] + orjson.dumps(text)
            if parsed_parts:
                content = self._heads[i] + parsed_parts[-1][1]
            self._written[i] = stream.position()
            form = answers.logprobs(self._key, logprobs, stream.next_char - len(text))
            middle = self._after_text + orjson.dumps(form)
            if self._key.token_ids:
                middle += b',"token_ids":' + orjson.dumps(token_ids)
            of_choice, of_chunk = self._extra_fields(i)
            parts = (content, middle, _inner(of_choice))
            event += self._id(self._written) + b"".join(parts) + self._end(of_chunk)
        # Any other end has no finish reason: only an error event follows.
        if stream.end is not None and stream.end.kind is OutcomeKind.COMPLETED:
            event += self._role(i)  # if the answer has no text
            self._written[i] = stream.position(is_ended=True)
            of_choice, of_chunk = self._extra_fields(i)
            event += self._finish(stream, stream.end, of_choice, of_chunk)
        return event

    def _parsed_parts(self, deltas: Sequence[AnswerDelta]) -> list[tuple[int, bytes]]:
        """Return the deltas of a parsed answer as JSON without the last brace, in the fewest events
        that keep their order, each with the number of tokens after which it is due."""
        parts = chat_deltas(deltas, names_reasoning_content=self._names_reasoning_content)
        return [(seq, b'"delta":' + orjson.dumps(delta)[:-1]) for seq, delta in parts]

    def _extra_fields(self, i: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return extra fields of a choice's next event, for the choice and for the chunk: the
        prompt's token ids, in the first event, and the usage so far."""
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
        """Return the part of an event after the log-probabilities, without a finish reason."""
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
        """Return the event of an error; it is the last one."""
        return b"data: %b\n\n" % error_body(error)

    def closing(self) -> bytes:
        """Return the usage, if the client asked for it, and the last line."""
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
        """Return the `id:` line of an event, with which its client can resume after it."""
        return self._prefix and b"%b%b\n" % (self._prefix, positions_text(positions))


def _inner(fields: dict[str, Any]) -> bytes:
    """Encode fields that follow other fields of an object."""
    return b"," + orjson.dumps(fields)[1:-1] if fields else b""


def whole_answer(
    key: StreamKey,
    streams: Sequence[Stream],
    prompts: Sequence[Sequence[int]] = (),
    *,
    names_reasoning_content: bool = False,
    echoes: Sequence[str] = (),
) -> bytes:
    """Return the body of an answer that is not streamed; all streams must have ended. `prompts` are
    the token ids of each choice's prompt, if the answer reports them, `echoes` the texts that
    precede the answers to completions, if any."""
    chat = key.endpoint is Endpoint.CHAT
    choices = []
    for stream in streams:
        end = stream.end
        assert end is not None
        answer = answer_of(stream)
        content: dict[str, Any]
        if chat:
            message = answer.message(names_reasoning_content=names_reasoning_content)
            content = {"message": message}
            if cited := annotations(stream.retrieved, len(answer.content)):
                message["annotations"] = cited
        else:
            content = {"text": (echoes[stream.choice] if echoes else "") + answer.content}
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
    """Return vLLM's fields about a prompt. Log-probabilities of prompt tokens are always None."""
    fields: dict[str, Any] = {"prompt_logprobs": None}
    if key.token_ids:
        fields["prompt_token_ids"] = list(prompts[choice]) if prompts else None
    return fields
