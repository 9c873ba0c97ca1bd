"""Server-sent events of a message, after any of which another gateway goes on exactly.

Theory of operation. A stream of events is one sequence of units: each event without text is a unit,
and so is each character of text. Their order follows from the log alone, however tokens are
grouped into writes. So the number of units that a client has, which is in the id of each event,
says exactly where it stands. A gateway that resumes the stream reads the answer from its first
token, builds the same units, and leaves out those that the client has.
"""

from typing import Any, Final

import orjson

from schemas.errors import TriviumError
from streams.anthropic.content import AnswerContent, BlockKind, Step
from streams.anthropic.errors import message_error
from streams.anthropic.message import (
    message_of,
    new_pieces,
    stop_fields,
    usage_at_start,
    usage_of,
)
from streams.calls.stream import answers
from streams.calls.stream.event_id import ClientPosition, positions_text
from streams.calls.stream.hub import Call

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta"'
_DELTAS = {  # by the kind of the block: type of the delta, and its field
    BlockKind.TEXT: (b"text_delta", b"text"),
    BlockKind.THINKING: (b"thinking_delta", b"thinking"),
    BlockKind.TOOL_USE: (b"input_json_delta", b"partial_json"),
}


class MessageEvents:
    """Drains the stream of one message into events."""

    def __init__(
        self,
        call: Call,
        *,
        tokens_max: int,
        name: bytes = b"",
        after: int = 0,
        prompt_tokens: int = 0,
    ) -> None:
        """Set up a writer. `tokens_max` is the size of the model's context; `name` is the common
        prefix of all event ids, or empty for events without ids; `after` is the number of units
        that the client has."""
        self._call, self._key = call, call.key
        (self._stream,) = call.streams
        self._tokens_max = tokens_max
        self._prefix = name and b"id: %b." % name
        self._after = after
        self._prompt_tokens = prompt_tokens
        self._units = 0
        self.content = AnswerContent(self._key.parent_id)
        self.keepalive = PING

    def opening(self) -> bytes:
        """Return nothing: an error before the first token has its own HTTP status."""
        return b""

    def drain(self) -> bytes:
        """Return all new events; empty if there are none."""
        if not self._stream.next_seq:
            return b""
        events = [] if self._units else [self._start()]
        events += map(self._step, self.content.take(new_pieces(self._stream)))
        return b"".join(events)

    def closing(self) -> bytes:
        """Return the events after the last token: ends, usage, and why it stopped."""
        stream, end = self._stream, self._stream.end
        assert end is not None
        events = [] if self._units else [self._start()]  # an answer without tokens
        events += map(self._step, self.content.finish())
        stop = {
            "delta": stop_fields(stream, end, self.content, self._tokens_max),
            "usage": usage_of(stream),
            "trivium": answers.placement(self._key, [stream]),
        }
        events += [self._event("message_delta", **stop), self._event("message_stop")]
        return b"".join(events)

    def failing(self, error: TriviumError) -> bytes:
        """Return the event of an error; it is the last one."""
        _, body = message_error(error, self._key.parent_id)
        return b"event: error\ndata: %b\n\n" % body

    def _start(self) -> bytes:
        usage = usage_at_start(self._prompt_tokens)
        return self._event("message_start", message=message_of(self._key, [], usage=usage))

    def _step(self, step: Step) -> bytes:
        block, index = self.content.blocks[step.at], step.at
        if step.change == "text":
            return self._text(block.kind, step)
        if step.change == "start":
            return self._event("content_block_start", index=index, content_block=block.initial())
        events = b""
        if block.kind is BlockKind.THINKING:
            delta = {"type": "signature_delta", "signature": block.signature}
            events = self._event("content_block_delta", index=index, delta=delta)
        return events + self._event("content_block_stop", index=index)

    def _text(self, kind: BlockKind, step: Step) -> bytes:
        """Return the event of new text, without what the client has of it."""
        text, missing = step.text, self._after - self._units
        self._units += len(text)
        if missing > 0:
            text = text[missing:]
        if not text:
            return b""
        type_name, field = _DELTAS[kind]
        delta = b'{"type":"%b","%b":%b}' % (type_name, field, orjson.dumps(text))
        return b'%b%b,"index":%d,"delta":%b}\n\n' % (self._id(), _DELTA, step.at, delta)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event without text; empty if the client has it."""
        self._units += 1
        return b"" if self._units <= self._after else self._write(kind, fields)

    def _write(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, **fields})
        return b"%bevent: %b\ndata: %b\n\n" % (self._id(), kind.encode(), data)

    def _id(self) -> bytes:
        """Return the `id:` line of an event, with which its client can resume after it."""
        position = ClientPosition(next_seq=self._units)
        return self._prefix and b"%b%b\n" % (self._prefix, positions_text([position]))
