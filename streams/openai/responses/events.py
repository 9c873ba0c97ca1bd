"""Server-sent events of a response, each with a number that follows from the log alone.

Theory of operation. The events before the text are always the same, so their numbers are fixed. The
number of a delta is the last of these plus the number of tokens and characters that the answer has
with it. That grows with every delta, however tokens are grouped into writes, and any gateway that
reads the same frames computes the same numbers. The events after the text are numbered from there.
So numbers have gaps, and a client that resumes after a number, at any gateway, gets exactly the
rest.
"""

from typing import Any

import orjson

from schemas.errors import TriviumError
from schemas.records import TokenLogprob
from streams.calls.stream.chunks import KEEPALIVE
from streams.calls.stream.hub import Call
from streams.openai.responses.form import AnswerText, Form, Json, annotations, logprobs

_BEFORE, _WITH_SEARCH = 2, 7  # events before those of the message


class ResponseEvents:
    """Drains the stream of one response into events; `after` is the number of the client's last
    event."""

    def __init__(self, form: Form, call: Call, after: int = -1, *, keepalive: bytes = b"") -> None:
        self._form = form
        self._call = call
        (self._stream,) = call.streams
        self._after = after
        self.keepalive = keepalive
        self._message_at = 1 if form.searches else 0  # index of the message among the items
        self._first = _WITH_SEARCH if form.searches else _BEFORE
        self._has_begun = False
        self._texts: list[str] = []
        self._logprobs = list[TokenLogprob]()
        self._head = {
            "item_id": form.message_id,
            "output_index": self._message_at,
            "content_index": 0,
        }

    @property
    def text(self) -> str:
        """Return the answer's text so far."""
        return "".join(self._texts)

    def opening(self) -> bytes:
        """Return the events that can be sent when the call is accepted."""
        form = self._form
        events = [
            self._event(0, "created", response=form.initial_response()),
            self._event(1, "in_progress", response=form.running_response()),
        ]
        if form.searches:
            events += [
                self._event(2, "output_item.added", output_index=0, item=form.search(None)),
                self._search_event(3, "in_progress"),
                self._search_event(4, "searching"),
            ]
        return b"".join(events) or KEEPALIVE

    def drain(self) -> bytes:
        """Return the event of the new text, unless the client has it."""
        stream = self._stream
        if not stream.next_seq and (stream.end is None or self._call.failed_end is not None):
            return b""
        text = stream.drain()
        events = [] if self._has_begun else self._beginning()
        self._has_begun = True
        if text:
            new, stream.logprobs = stream.logprobs, []
            self._texts.append(text)
            self._logprobs += new
            logprobs_json = logprobs(tuple(new))
            delta = {**self._head, "delta": text, "logprobs": logprobs_json}
            events.append(self._event(self._number(), "output_text.delta", **delta))
        return b"".join(events)

    def skip(self) -> None:
        """Drop text that the client has. Call it after every frame, as that text may end within a
        write."""
        if self._number() <= self._after:
            self.drain()

    def closing(self) -> bytes:
        """Return the events after the text of a complete answer."""
        form, stream, answer = self._form, self._stream, self._answer_text()
        part = form.part(stream, answer)
        message = form.message(stream, answer, "completed")
        whole = form.whole(self._call, answer, None)
        if whole["status"] != "completed":
            message["status"] = whole["status"]
        cited = annotations(stream, len(answer.text))
        following: list[tuple[str, Json]] = [
            ("output_text.annotation.added", {**self._head, "annotation_index": i, "annotation": a})
            for i, a in enumerate(cited)
        ]
        done_fields = {**self._head, "text": answer.text, "logprobs": part["logprobs"]}
        following += [
            ("output_text.done", done_fields),
            ("content_part.done", {**self._head, "part": part}),
            ("output_item.done", {"output_index": self._message_at, "item": message}),
            (whole["status"], {"response": whole}),
        ]
        number = self._number() + 1
        return b"".join(
            self._event(number + i, name, **fields) for i, (name, fields) in enumerate(following)
        )

    def failing(self, error: TriviumError) -> bytes:
        """Return the event of a response that failed or was cancelled, with its answer so far."""
        whole = self._form.whole(self._call, self._answer_text(), error)
        return self._event(self._number() + 1, "failed", response=whole)

    def _beginning(self) -> list[bytes]:
        """Return the events right before the text."""
        form, stream, first = self._form, self._stream, self._first
        item = form.message(stream, AnswerText(), "in_progress") | {"content": []}
        part = form.part(stream, AnswerText()) | {"annotations": []}
        events = []
        if form.searches:
            searched = form.search(stream)
            events = [
                self._search_event(first - 2, "completed"),
                self._event(first - 1, "output_item.done", output_index=0, item=searched),
            ]
        at = self._message_at
        return [
            *events,
            self._event(first, "output_item.added", output_index=at, item=item),
            self._event(first + 1, "content_part.added", **self._head, part=part),
        ]

    def _answer_text(self) -> AnswerText:
        return AnswerText(text=self.text, logprobs=tuple(self._logprobs))

    def _number(self) -> int:
        """Return the number of the delta that ends where the stream is now."""
        return self._first + 1 + self._stream.next_seq + self._stream.next_char

    def _search_event(self, number: int, state: str) -> bytes:
        fields = {"output_index": 0, "item_id": self._form.search_id}
        return self._event(number, f"file_search_call.{state}", **fields)

    def _event(self, number: int, name: str, **fields: Any) -> bytes:
        """Encode an event; empty if the client has it already."""
        if number <= self._after:
            return b""
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
