"""The text of a custom tool's call. Pure.

A custom tool takes free text. The model is offered a function with one argument `input`, and
clients get that argument's text, without the escapes of JSON, as it arrives.
"""

import json
import re
from typing import Final

INPUT: Final = "input"
PARAMETERS: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_CHARS_MAX = 256  # of arguments that do not begin as they should
_PIECE = re.compile(r'[^"\\]+|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u\w{4}|\\[^u]', re.ASCII)
_ESCAPE_CHARS_MAX = 12  # a character outside the basic plane: two escapes of six characters
_HIGH_HALF = re.compile(r"\\u[dD][89abAB]\w\w", re.ASCII)


def arguments_of(text: str) -> str:
    """Return the arguments of the offered function for an input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the input from arguments as they arrive, piece by piece."""

    def __init__(self) -> None:
        self._arguments = ""  # until it is known how they begin
        self._rest = ""  # of the input: an escape that is not complete
        self._has_begun = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """Take more of the arguments; return more of the input."""
        if self._is_over:
            return ""
        if not self._has_begun:
            self._arguments += arguments
            head = _HEAD.match(self._arguments[:_HEAD_CHARS_MAX])
            if head is None:
                return ""
            self._has_begun = True
            arguments, self._arguments = self._arguments[head.end() :], ""
        return self._unescape(self._rest + arguments)

    def _unescape(self, escaped: str, *, is_last: bool = False) -> str:
        texts, at = [], 0
        while at < len(escaped) and escaped[at] != '"':
            piece = _PIECE.match(escaped, at)
            rest = escaped[at:]
            may_grow = not is_last and len(rest) < _ESCAPE_CHARS_MAX
            is_half = piece is not None and _HIGH_HALF.fullmatch(piece[0]) is not None
            if may_grow and (piece is None or (is_half and _may_be_low_half(rest[6:]))):
                break
            spelled = escaped[at] if piece is None else piece[0]
            texts.append(_character(spelled) if spelled[0] == "\\" else spelled)
            at += len(spelled)
        self._is_over = escaped[at : at + 1] == '"'
        self._rest = escaped[at:]
        return "".join(texts)

    def finish(self) -> str:
        """Return what the end of the arguments adds to the input: all of it, if they do not begin
        as the function's schema demands."""
        if self._has_begun:
            return "" if self._is_over else self._unescape(self._rest, is_last=True)
        try:
            value = json.loads(self._arguments or '""')
        except (ValueError, RecursionError):
            return self._arguments
        text = value.get(INPUT) if isinstance(value, dict) else value
        return text if isinstance(text, str) else self._arguments


def _may_be_low_half(rest: str) -> bool:
    """Return whether an escape that begins so may be the second half of a character."""
    return not rest or rest[:2] in ("\\", "\\u")


def _character(escape: str) -> str:
    """Return the character of an escape; the escape itself if it is none, as models may write."""
    try:
        text: str = json.loads(f'"{escape}"')
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except ValueError:
        return escape
