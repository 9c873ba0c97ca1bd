"""What the deltas of a parsed answer add up to, and their form in OpenAI's chats. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.records import AnswerDelta, DeltaKind, TokenFrame
from streams.calls.ids import call_text
from streams.calls.stream.stream import Stream

Json = dict[str, Any]


@dataclass(slots=True)
class ToolCall:
    """A tool call of an answer; `arguments` is JSON as the model wrote it, perhaps cut off."""

    call_id: str
    name: str
    arguments: str = ""

    def to_json(self) -> Json:
        """Return the call as chats have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(slots=True)
class ParsedAnswer:
    """An answer's content, reasoning and tool calls so far."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)  # by index, in their order

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        """Add the next deltas to the answer."""
        for delta in deltas:
            if delta.kind is DeltaKind.CONTENT:
                self.content += delta.text
            elif delta.kind is DeltaKind.REASONING:
                self.reasoning += delta.text
            elif delta.index in self.calls:
                self.calls[delta.index].arguments += delta.text
            else:
                self.calls[delta.index] = ToolCall(delta.call_id, delta.name, delta.text)

    @property
    def call_texts(self) -> list[str]:
        """Return texts of the tool calls, for the hash of the conversation."""
        calls = self.calls.values()
        return [call_text(call.call_id, call.name, call.arguments) for call in calls]

    def message(self, *, names_reasoning_content: bool) -> Json:
        """Return the message of a chat. With `names_reasoning_content`, the reasoning is also in
        `reasoning_content`, where older clients read it."""
        fields: Json = {"role": "assistant", "content": self.content}
        if self.calls:
            fields["content"] = self.content or None
            fields["tool_calls"] = [call.to_json() for call in self.calls.values()]
        fields["reasoning"] = self.reasoning or None  # as in vLLM: OpenAI's client has no default
        if self.reasoning and names_reasoning_content:
            fields["reasoning_content"] = self.reasoning
        return fields


def deltas_by_row(frame: TokenFrame) -> dict[tuple[str, int, int], Sequence[AnswerDelta]]:
    """Return the deltas of a frame by the request, the attempt and the first token of their row."""
    return {
        (entry.request_id, entry.attempt, entry.first_seq): entry.deltas for entry in frame.deltas
    }


def answer_of(stream: Stream) -> ParsedAnswer:
    """Return what was not drained of a stream: its text, or its deltas."""
    answer = ParsedAnswer(content="".join(stream.texts))
    answer.add(stream.deltas)
    return answer


def chat_deltas(
    deltas: Sequence[AnswerDelta], *, names_reasoning_content: bool
) -> Iterator[tuple[int, Json]]:
    """Yield the deltas as `delta` objects of chats, as few as their order allows, each with the
    number of tokens after which it is due."""
    group: list[AnswerDelta] = []
    for delta in deltas:
        if group and _order(delta) < _order(group[-1]):
            yield group[-1].seq, _chat_delta(group, names_reasoning_content)
            group = []
        group.append(delta)
    if group:
        yield group[-1].seq, _chat_delta(group, names_reasoning_content)


def _order(delta: AnswerDelta) -> int:
    return (DeltaKind.REASONING, DeltaKind.CONTENT, DeltaKind.CALL).index(delta.kind)


def _chat_delta(group: Sequence[AnswerDelta], names_reasoning_content: bool) -> Json:
    fields: Json = {}
    calls: dict[int, Json] = {}
    for delta in group:
        if delta.kind is not DeltaKind.CALL:
            name = "content" if delta.kind is DeltaKind.CONTENT else "reasoning"
            fields[name] = fields.get(name, "") + delta.text
            continue
        call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.name:
            call |= {"id": delta.call_id, "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        call["function"]["arguments"] += delta.text
    if calls:
        fields["tool_calls"] = [*calls.values()]
    if names_reasoning_content and "reasoning" in fields:
        fields["reasoning_content"] = fields["reasoning"]
    return fields
