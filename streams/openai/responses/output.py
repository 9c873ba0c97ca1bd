"""The output of a response as items: reasoning, messages and tool calls, in their order. Pure.

Every delta of an answer becomes steps, which depend on the deltas alone and not on how they are
grouped. An item is closed before the next one opens. White space between reasoning and tool calls
is no message.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from schemas.records import AnswerDelta, DeltaKind, OutcomeKind, TokenLogprob
from streams.calls.stream.stream import Stream
from streams.openai.responses.custom_input import InputReader


@dataclass(slots=True, eq=False)
class OutputItem:
    """An item of the output so far; `text` is that of its only part, or its arguments."""

    kind: DeltaKind
    number: int  # among the items of its kind
    index: int  # among all items, without a search
    call_id: str = ""
    name: str = ""
    input_reader: InputReader | None = None  # of a call of a custom tool
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_open: bool = True

    @property
    def is_custom(self) -> bool:
        """Return whether it calls a custom tool."""
        return self.input_reader is not None


class StepKind(Enum):
    """What happens to an item."""

    OPEN = "open"
    DELTA = "delta"
    CLOSE = "close"


class ItemStep(NamedTuple):
    """One change of an item; a delta has more of its text."""

    kind: StepKind
    item: OutputItem
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class ResponseOutput:
    """The items of one answer so far."""

    def __init__(self, custom_names: Collection[str] = ()) -> None:
        """Begin without items. `custom_names` are the names of custom tools."""
        self.items: list[OutputItem] = []
        self.is_parsed = False  # whether it has deltas of a parser
        self._custom_names = custom_names
        self._space = ""  # before a message that may begin
        self._space_logprobs: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []  # of tokens whose deltas are awaited
        self._next_seq = 0  # of the first of them

    @property
    def _last(self) -> OutputItem | None:
        return self.items[-1] if self.items and self.items[-1].is_open else None

    def add_text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[ItemStep]:
        """Add text of an answer that is not parsed: it has one message."""
        steps = [] if self._last is not None else self._open(DeltaKind.CONTENT)
        return [*steps, self._extend(text, logprobs)]

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of the next tokens of a parsed answer, before their deltas."""
        self._logprobs += logprobs

    def add(self, delta: AnswerDelta) -> list[ItemStep]:
        """Add a delta of a parsed answer."""
        self.is_parsed = True
        logprobs = self._take_logprobs(delta.seq)
        if delta.kind is DeltaKind.CALL:
            return self._add_call(delta)
        last, text = self._last, delta.text
        steps: list[ItemStep] = []
        if last is None or last.kind is not delta.kind:
            if delta.kind is DeltaKind.CONTENT:
                text, logprobs = self._space + text, [*self._space_logprobs, *logprobs]
                if not text.strip():
                    self._space, self._space_logprobs = text, logprobs
                    return []
            steps = self._open(delta.kind)
        if not text:
            return steps
        return [*steps, self._extend(text, logprobs if delta.kind is DeltaKind.CONTENT else ())]

    def _take_logprobs(self, seq: int) -> list[TokenLogprob]:
        count = max(0, seq - self._next_seq)
        self._next_seq = max(seq, self._next_seq)
        first, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return first

    def _add_call(self, delta: AnswerDelta) -> list[ItemStep]:
        last = self._last
        steps = []
        if delta.name:
            steps = self._open(DeltaKind.CALL)
            last = self.items[-1]
            last.call_id, last.name = delta.call_id, delta.name
            if delta.name in self._custom_names:
                last.input_reader = InputReader()
        if last is None or last.kind is not DeltaKind.CALL:
            return steps  # parsers end a call before they begin the next part of an answer
        text = delta.text if last.input_reader is None else last.input_reader.feed(delta.text)
        return [*steps, self._extend(text)] if text else steps

    def _open(self, kind: DeltaKind) -> list[ItemStep]:
        steps = self._close()
        self._space, self._space_logprobs = "", []
        number = sum(item.kind is kind for item in self.items)
        self.items.append(OutputItem(kind, number, len(self.items)))
        return [*steps, ItemStep(StepKind.OPEN, self.items[-1])]

    def _extend(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> ItemStep:
        item = self.items[-1]
        item.text += text
        item.logprobs += logprobs
        return ItemStep(StepKind.DELTA, item, text, logprobs)

    def _close(self) -> list[ItemStep]:
        last = self._last
        if last is None:
            return []
        rest = "" if last.input_reader is None else last.input_reader.finish()
        steps = [self._extend(rest)] if rest else []
        last.is_open = False
        return [*steps, ItemStep(StepKind.CLOSE, last)]

    def finish(self) -> list[ItemStep]:
        """End a complete answer; one without any item has an empty message."""
        steps = []
        if not self.items:
            space, logprobs = self._space, self._space_logprobs
            steps = self._open(DeltaKind.CONTENT)
            steps += [self._extend(space, logprobs)] if space else []
        return steps + self._close()


def output_of(stream: Stream, custom_names: Collection[str]) -> ResponseOutput:
    """Return the output of a stream of which nothing was drained."""
    output = ResponseOutput(custom_names)
    text = "".join(stream.texts)
    if text:
        output.add_text(text, stream.logprobs)
    output.add_logprobs(stream.logprobs)
    for delta in stream.deltas:
        output.add(delta)
    if stream.end is not None and stream.end.kind is OutcomeKind.COMPLETED:
        output.finish()
    return output
