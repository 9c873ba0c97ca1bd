"""Server-sent events of a response, each with a number that follows from the log alone.

Theory of operation. The events before the answer are always the same, so their numbers are fixed.
In an answer that is text, the number of a delta is the last of these plus the number of tokens and
characters that the answer has with it. That grows with every delta, however tokens are grouped into
writes, and any gateway that reads the same frames computes the same numbers. The deltas of a parsed
answer are on the log. Its events are numbered as if each delta had events of its own; deltas that
are written together have the number of the last. The events after the answer are numbered from
there. So numbers have gaps, and a client that resumes after a number, at any gateway, gets exactly
the rest.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from schemas.errors import TriviumError
from schemas.records import DeltaKind
from streams.calls.stream.chunks import KEEPALIVE
from streams.calls.stream.hub import Call, CallStream
from streams.openai.responses.form import IN_PROGRESS, Form, Json, annotations, logprobs
from streams.openai.responses.output import ItemStep, OutputItem, StepKind

_BEFORE, _WITH_SEARCH = 2, 7  # events before those of the answer
_DELTAS = {
    DeltaKind.CONTENT: "output_text",
    DeltaKind.REASONING: "reasoning_text",
    DeltaKind.CALL: "function_call_arguments",
}
_CUSTOM = "custom_tool_call_input"


class ResponseEvents:
    """Drains the stream of one response into events; `after` is the number of the client's last
    event."""

    def __init__(self, form: Form, call: Call, after: int = -1, *, keepalive: bytes = b"") -> None:
        self._form = form
        self._call = call
        (self._stream,) = call.streams
        self._after = after
        self.keepalive = keepalive
        self._items_before = 1 if form.searches else 0
        self._first = _WITH_SEARCH if form.searches else _BEFORE
        self._number = self._first - 1  # of the last event, once the answer has begun
        self._has_begun = False
        self.output = form.new_output()

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
        """Return the events of what is new, unless the client has them."""
        stream, output = self._stream, self.output
        if not stream.next_seq and (stream.end is None or self._call.failed_end is not None):
            return b""
        events = [] if self._has_begun else self._end_of_search()
        self._has_begun = True
        text = stream.drain()
        deltas, stream.deltas = stream.deltas, []
        new_logprobs, stream.logprobs = stream.logprobs, []
        if text:
            steps = output.add_text(text, new_logprobs)
            events += self._opened(steps[:-1])
            self._number = self._position()
            events.append(self._delta(self._number, steps[-1]))
        else:
            output.add_logprobs(new_logprobs)
            events += self._joined(step for delta in deltas for step in output.add(delta))
        return b"".join(events)

    def skip(self) -> None:
        """Drop text that the client has. Call it after every frame, as that text may end within a
        write."""
        if self._position() <= self._after and not self._stream.deltas:
            self.drain()

    def closing(self) -> bytes:
        """Return the events after the last tokens of a complete answer."""
        events, steps = self._end_of_search(), self.output.finish()
        if not self.output.is_parsed:
            events += self._opened(step for step in steps if step.kind is StepKind.OPEN)
            self._number = self._position()
            steps = steps[-1:]
        *steps, close = steps
        events += self._joined(steps)
        whole = self._form.whole(self._call, self.output, None)
        last_events = self._endings(close.item, self._stream, whole["status"])
        for name, fields in [*last_events, (whole["status"], {"response": whole})]:
            self._number += 1
            events.append(self._event(self._number, name, **fields))
        return b"".join(events)

    def failing(self, error: TriviumError) -> bytes:
        """Return the event of a response that failed or was cancelled, with its answer so far."""
        whole = self._form.whole(self._call, self.output, error)
        number = self._number if self.output.is_parsed else self._position()
        return self._event(number + 1, "failed", response=whole)

    def _end_of_search(self) -> list[bytes]:
        if self._has_begun or not self._form.searches:
            return []
        self._has_begun = True
        searched = self._form.search(self._stream)
        return [
            self._search_event(self._first - 2, "completed"),
            self._event(self._first - 1, "output_item.done", output_index=0, item=searched),
        ]

    def _position(self) -> int:
        """Return the number of the delta that ends where the stream of an answer without a parser
        is now."""
        return self._first + 1 + self._stream.next_seq + self._stream.next_char

    def _joined(self, steps: Iterable[ItemStep]) -> list[bytes]:
        """Return the events of steps, with as few deltas as their order allows."""
        events: list[bytes] = []
        waiting: tuple[int, ItemStep] | None = None  # a delta, and the number of its event
        for step in steps:
            if step.kind is StepKind.DELTA:
                self._number += 1
                if self._number <= self._after:
                    continue
                if waiting is not None:
                    _, earlier = waiting
                    tokens = (*earlier.logprobs, *step.logprobs)
                    step = step._replace(text=earlier.text + step.text, logprobs=tokens)
                waiting = self._number, step
                continue
            if waiting is not None:
                events.append(self._delta(*waiting))
                waiting = None
            events += self._opened([step])
        if waiting is not None:
            events.append(self._delta(*waiting))
        return events

    def _opened(self, steps: Iterable[ItemStep]) -> list[bytes]:
        """Return the events of the beginnings and ends of items, with the next numbers."""
        events = []
        for step in steps:
            is_open = step.kind is StepKind.OPEN
            for name, fields in (self._openings if is_open else self._endings)(step.item):
                self._number += 1
                events.append(self._event(self._number, name, **fields))
        return events

    def _openings(self, item: OutputItem) -> Iterator[tuple[str, Json]]:
        empty = OutputItem(item.kind, item.number, item.index, item.call_id, item.name)
        empty.input_reader = item.input_reader
        fields = self._form.item(empty, None, IN_PROGRESS)
        place = {"output_index": self._items_before + item.index}
        if item.kind is DeltaKind.CALL:
            yield "output_item.added", {**place, "item": fields}
            return
        yield "output_item.added", {**place, "item": fields | {"content": []}}
        yield "content_part.added", {**self._head(item), "part": self._form.part(empty)}

    def _endings(
        self, item: OutputItem, stream: CallStream | None = None, status: str = "completed"
    ) -> Iterator[tuple[str, Json]]:
        """Yield the events that end an item; `stream` has the citations of the last one."""
        head = self._head(item)
        if item.kind is DeltaKind.CONTENT:
            cited = [] if stream is None else annotations(stream, len(item.text))
            for i, annotation in enumerate(cited):
                fields = {"annotation_index": i, "annotation": annotation}
                yield "output_text.annotation.added", {**head, **fields}
            text = {"text": item.text, "logprobs": logprobs(item.logprobs)}
            yield "output_text.done", {**head, **text}
        elif item.kind is DeltaKind.REASONING:
            yield "reasoning_text.done", {**head, "text": item.text}
        elif item.is_custom:
            yield f"{_CUSTOM}.done", {**head, "input": item.text}
        else:
            fields = {"name": self._form.names(item)["name"], "arguments": item.text}
            yield "function_call_arguments.done", {**head, **fields}
        if item.kind is not DeltaKind.CALL:
            yield "content_part.done", {**head, "part": self._form.part(item, stream)}
        whole = self._form.item(item, stream, status)
        yield "output_item.done", {"output_index": head["output_index"], "item": whole}

    def _head(self, item: OutputItem) -> Json:
        index = self._items_before + item.index
        head: Json = {"item_id": self._form.item_id(item), "output_index": index}
        return head if item.kind is DeltaKind.CALL else head | {"content_index": 0}

    def _delta(self, number: int, step: ItemStep) -> bytes:
        item = step.item
        fields = {**self._head(item), "delta": step.text}
        if item.kind is DeltaKind.CONTENT:
            fields["logprobs"] = logprobs(step.logprobs)
        name = _CUSTOM if item.is_custom else _DELTAS[item.kind]
        return self._event(number, f"{name}.delta", **fields)

    def _search_event(self, number: int, state: str) -> bytes:
        fields = {"output_index": 0, "item_id": self._form.search_id}
        return self._event(number, f"file_search_call.{state}", **fields)

    def _event(self, number: int, name: str, /, **fields: Any) -> bytes:
        """Encode an event; empty if the client has it already."""
        if number <= self._after:
            return b""
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
