"""The content blocks of an answer, from its pieces in the order of the log.

Pure. Text, thinking and each call of a tool are blocks of their own. A block of text begins with
its first character that is no white space, since models write line breaks between their calls.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic_core import from_json

from streams.calls.ids import call_text

Json = dict[str, Any]
INVALID_JSON = "INVALID_JSON"  # the name under which Anthropic's clients expect such input


class BlockKind(StrEnum):
    """The types of blocks that answers have."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"


class AnswerPiece(NamedTuple):
    """New text of an answer. Pieces of one call of a tool have its id and its name."""

    kind: BlockKind
    text: str
    call_id: str = ""
    name: str = ""
    call: int = 0  # the index of the call among the calls


class Step(NamedTuple):
    """A block that begins or ends, or new text in it."""

    change: str  # start, text or stop
    at: int  # the index of the block
    text: str = ""


class ContentBlock:
    """One block of an answer so far."""

    __slots__ = ("call", "call_id", "kind", "name", "signature", "texts")

    def __init__(self, piece: AnswerPiece, signature: str) -> None:
        self.kind, self.call = piece.kind, piece.call
        self.call_id, self.name = piece.call_id, piece.name
        self.signature = signature  # of a block of thinking
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        """Return the text so far: for a call of a tool, the JSON of its arguments."""
        return "".join(self.texts)

    def initial(self) -> Json:
        """Return the block before it has any text."""
        if self.kind is BlockKind.TEXT:
            return {"type": "text", "text": "", "citations": None}
        if self.kind is BlockKind.THINKING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}

    def whole(self) -> Json:
        """Return the block with all its text."""
        if self.kind is BlockKind.TEXT:
            return self.initial() | {"text": self.text}
        if self.kind is BlockKind.THINKING:
            return self.initial() | {"thinking": self.text, "signature": self.signature}
        return self.initial() | {"input": _input(self.text)}


def _input(arguments: str) -> Json:
    """Parse arguments, as far as they go if the answer was cut off."""
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {INVALID_JSON: arguments}
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


class AnswerContent:
    """The blocks of one answer; `take` and `finish` yield what is new."""

    def __init__(self, request_id: str) -> None:
        self.blocks: list[ContentBlock] = []
        self._request_id = request_id
        self._blank = ""  # white space before a block of text
        self._is_open = False  # the last block has not ended

    @property
    def text(self) -> str:
        """Return the text so far, as the next turn has it, without thinking and calls."""
        return "\n".join(block.text for block in self.blocks if block.kind is BlockKind.TEXT)

    @property
    def call_texts(self) -> list[str]:
        """Return texts of the calls of tools, for the hash of the conversation."""
        calls = [block for block in self.blocks if block.kind is BlockKind.TOOL_USE]
        return [call_text(call.call_id, call.name, _input(call.text)) for call in calls]

    def take(self, pieces: Iterable[AnswerPiece]) -> Iterator[Step]:
        """Take the next pieces of the answer, and yield what they change."""
        for piece in pieces:
            yield from self._take(piece)

    def finish(self) -> Iterator[Step]:
        """End the last block. An answer of white space alone is a block of text, too."""
        if self._blank and not self.blocks:
            yield from self._begin(AnswerPiece(BlockKind.TEXT, self._blank))
        self._blank = ""
        yield from self._end()

    def whole(self, pieces: Iterable[AnswerPiece]) -> list[Json]:
        """Return the blocks of an answer that has ended."""
        for step in (self.take(pieces), self.finish()):
            list(step)
        return [block.whole() for block in self.blocks]

    def _take(self, piece: AnswerPiece) -> Iterator[Step]:
        index = self._find(piece)
        if index is None:
            if piece.kind is not BlockKind.TOOL_USE:
                if piece.kind is BlockKind.TEXT:
                    piece = piece._replace(text=self._blank + piece.text)
                if not piece.text.strip():
                    self._blank = piece.text if piece.kind is BlockKind.TEXT else ""
                    return
            yield from self._begin(piece)
        elif piece.text:
            self.blocks[index].texts.append(piece.text)
            yield Step("text", index, piece.text)

    def _find(self, piece: AnswerPiece) -> int | None:
        """Return the index of the block that a piece belongs to, or None for a new one."""
        if piece.kind is BlockKind.TOOL_USE:  # calls may be written in turns
            for index in range(len(self.blocks) - 1, -1, -1):
                block = self.blocks[index]
                if block.kind is piece.kind and block.call == piece.call:
                    return index
            return None
        last = len(self.blocks) - 1
        return last if self._is_open and self.blocks[last].kind is piece.kind else None

    def _begin(self, piece: AnswerPiece) -> Iterator[Step]:
        yield from self._end()
        self._blank = ""
        index = len(self.blocks)
        signature = f"{self._request_id}.{index}" if piece.kind is BlockKind.THINKING else ""
        block = ContentBlock(piece, signature)
        self.blocks.append(block)
        self._is_open = True
        yield Step("start", index)
        if piece.text:
            block.texts.append(piece.text)
            yield Step("text", index, piece.text)

    def _end(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("stop", len(self.blocks) - 1)
