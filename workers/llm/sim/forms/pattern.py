"""Generates a text that a regular expression matches as a whole, from random numbers. Pure.

It supports Python's expressions except lookarounds and word boundaries, which engines with
constrained answers do not support either. An unbounded repetition is repeated a few times.
"""

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from re import _parser as parser  # no public module offers it
from typing import Any

from schemas.errors import InvalidRequest

CHARS_MAX = 16_384
_MORE_MAX = 3  # repetitions beyond the minimum
_WORD = string.ascii_lowercase
_ANY = string.ascii_letters + string.digits + " .,:;-_!?#/()"
_CATEGORIES = {
    "category_digit": string.digits,
    "category_word": _WORD,
    "category_space": " ",
    "category_not_digit": _WORD,
    "category_not_word": " .,-",
    "category_not_space": _WORD,
}
_EDGES = {
    "at_beginning": "start", "at_beginning_string": "start", "at_end": "end", "at_end_string": "end"
}  # fmt: skip
_REPEATS = ("max_repeat", "min_repeat", "possessive_repeat")
Part = tuple[Any, Any]


def draw(pattern: str, rng: random.Random) -> str:
    """Return a text that matches; raises InvalidRequest for unsupported or invalid patterns."""
    try:
        parts = _parse(pattern)
    except re.error as error:
        raise InvalidRequest(
            f"the simulated engine cannot read the pattern {pattern[:80]!r}: {error}"
        ) from error
    return _Drawing(rng).all_of(parts)


def _kind_of(code: Any) -> str:
    return str(code).lower()


@lru_cache(maxsize=256)
def _parse(pattern: str) -> Sequence[Part]:
    return list(parser.parse(pattern))


class _Drawing:
    """One text for one expression."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._groups: dict[int, str] = {}
        self._chars = 0
        self._is_over = False  # `$` was passed: no text may follow
        self._parts: Mapping[str, Callable[[Any], str]] = {
            "literal": lambda code: self._say(chr(code)),
            "not_literal": lambda code: self._say(self._other_than({chr(code)})),
            "any": lambda _: self._say(rng.choice(_WORD)),
            "in": lambda choices: self._say(self._one_of(choices)),
            "branch": lambda argument: self.all_of(rng.choice(argument[1])),
            "subpattern": self._group,
            "atomic_group": self.all_of,
            "groupref": lambda number: self._say(self._groups.get(number, "")),
            "at": self._edge,
            **dict.fromkeys(_REPEATS, self._repeat),
        }

    def all_of(self, parts: Sequence[Part]) -> str:
        """Return the texts of all parts, joined."""
        return "".join([self._part(*part) for part in parts])

    def _part(self, code: Any, argument: Any) -> str:
        kind = _kind_of(code)
        if kind not in self._parts:
            raise InvalidRequest(f"the simulated engine draws no texts for `{kind}` in a pattern")
        return self._parts[kind](argument)

    def _say(self, text: str) -> str:
        self._chars += len(text)
        if self._chars > CHARS_MAX:
            raise InvalidRequest(f"the simulated engine draws at most {CHARS_MAX} characters")
        if text and self._is_over:
            raise InvalidRequest("the simulated engine found something behind `$` in a pattern")
        return text

    def _group(self, argument: Any) -> str:
        number, _, _, parts = argument
        text = self.all_of(parts)
        if number is not None:
            self._groups[number] = text
        return text

    def _repeat(self, argument: Any) -> str:
        repeat_min, repeat_max, parts = argument
        count = repeat_min + self._rng.randint(0, min(int(repeat_max) - repeat_min, _MORE_MAX))
        texts = []
        for _ in range(count):
            texts.append(self.all_of(parts))
            if not texts[-1]:  # further repetitions are empty too
                break
        return "".join(texts)

    def _edge(self, argument: Any) -> str:
        edge = _EDGES.get(_kind_of(argument))
        if edge is None or (edge == "start" and self._chars):
            raise InvalidRequest(
                f"the simulated engine draws no texts for `{_kind_of(argument)}` here"
            )
        self._is_over |= edge == "end"
        return ""

    def _one_of(self, choices: Sequence[Part]) -> str:
        if _kind_of(choices[0][0]) == "negate":
            refused = {char for char in _ANY if any(_holds(choice, char) for choice in choices[1:])}
            return self._other_than(refused)
        code, argument = self._rng.choice(choices)
        match _kind_of(code):
            case "range":
                return chr(self._rng.randint(*argument))
            case "category":
                return self._rng.choice(_CATEGORIES[_kind_of(argument)])
        return chr(argument)

    def _other_than(self, refused: set[str]) -> str:
        allowed = [char for char in _ANY if char not in refused]
        if not allowed:
            raise InvalidRequest("the simulated engine found no character that a pattern allows")
        return self._rng.choice(allowed)


def _holds(choice: Part, char: str) -> bool:
    """Return whether a character is in this range, category or literal."""
    code, argument = choice
    match _kind_of(code):
        case "range":
            return bool(argument[0] <= ord(char) <= argument[1])
        case "category":
            escape = {"digit": r"\d", "word": r"\w", "space": r"\s"}
            name = _kind_of(argument).removeprefix("category_").removeprefix("not_")
            return (re.match(escape[name], char) is None) is ("_not_" in _kind_of(argument))
    return bool(ord(char) == argument)
