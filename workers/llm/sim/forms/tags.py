"""Draws the text of a structural tag: tags with constrained content, and free text around them.

xgrammar, with which vLLM constrains such answers, tells what may follow a text. Random pieces would
hardly ever spell a tag. So at each step the *marks* of the form (beginnings and ends of tags, and
other constants) are tried too: a mark that leads to another state is likely to be taken. xgrammar
comes with vLLM and imports torch, so `text.py` imports this module only for such a form.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xgrammar

from schemas.errors import InvalidRequest
from workers.llm.sim.forms.pieces import (
    EARLY_SHARES,
    END_PIECE,
    LATE_SHARES,
    LATE_STEPS,
    PIECES,
    PLAIN_WORDS,
)

_TOKEN_FIELDS = ("token", "trigger_tokens", "exclude_tokens", "rules")
_MARK_FIELDS = ("begin", "end", "triggers", "value", "separator", "rules")
# Ends of names and parameters that the styles of `json_schema` add themselves.
_STYLE_MARKS = (
    ">", '"', "</parameter>", "</arg_value>", "</｜DSML｜parameter>", "</｜DSML｜ parameter>",
    "</cofl:value>", "<|close|>argument<|sep|>",
)  # fmt: skip
_NAMED_MARK = "]<]minimax[>[</{}>"  # the end of such a parameter has its name
_Mark = bytes | int  # a text, or the index of a token
_OBJECT = {"type": "object"}
_MARK_SHARE = 0.4  # of the steps at which a mark or the end is taken if one may follow
_END_SHARE = 0.5  # of the choices between a mark and the end
_STEPS_MAX = 1_000  # pieces and marks of one text
_CONTROL = 1  # a byte that free text may contain, and no JSON
_PLAIN_PIECES = slice(256, 256 + len(PLAIN_WORDS))
_SPACED_PIECES = slice(256 + len(PLAIN_WORDS), END_PIECE)
_WORD_PIECES = slice(256, END_PIECE)
_RARE_SHARE = 1e-9  # of white space, which may stand almost everywhere


def draw_tags(value: str, rng: random.Random) -> str:
    """Return a text of a structural tag; raises InvalidRequest if there is none."""
    drawing = _Drawing(_compiled_form(value))
    for step in range(_STEPS_MAX):
        if drawing.advance(rng, late=step >= LATE_STEPS):
            return drawing.text.decode()
    raise _refusal("its texts are too long")


@dataclass(frozen=True, slots=True)
class _CompiledForm:
    """A compiled structural tag, its vocabulary and its marks."""

    grammar: Any
    tokens: tuple[bytes, ...]  # pieces, the end, and the tokens that the form names
    marks: tuple[_Mark, ...]


class _Drawing:
    """The text so far, and the state of its matcher."""

    def __init__(self, form: _CompiledForm) -> None:
        self.text = bytearray()
        self._form, self._matcher = form, xgrammar.GrammarMatcher(form.grammar)
        self._words = 0  # of the present free text

    def advance(self, rng: random.Random, *, late: bool) -> bool:
        """Add a piece, a mark or what is forced; return whether the text has ended instead."""
        if forced := _forced_text(self._matcher):
            self._take_mark(forced)
            return False
        may_follow = self._followers(self._matcher)
        is_free, may_end = bool(may_follow[_CONTROL]), bool(may_follow[END_PIECE])
        has_begun = self._words > 0 or not is_free
        self._words = self._words + 1 if is_free else 0
        if has_begun and (late or rng.random() < _MARK_SHARE):
            marks = [*self._leading_marks(may_follow)]
            if may_end and (late or not marks or rng.random() < _END_SHARE):
                return True
            if marks:
                self._words = 0
                self._take_mark(rng.choice(marks))
                return False
        return self._take_piece(rng, self._shares(may_follow, is_free=is_free, late=late))

    def _shares(self, may_follow: Any, *, is_free: bool, late: bool) -> Any:
        """Return how likely each token is; shape (tokens,)."""
        shares = np.zeros(len(self._form.tokens))
        if is_free and may_follow[_WORD_PIECES].all():
            is_inside = self.text[-1:].isalnum()
            shares[_SPACED_PIECES if is_inside else _PLAIN_PIECES] = 1.0
        else:
            shares[: END_PIECE + 1] = LATE_SHARES if late else EARLY_SHARES
            shares[list(b" \t\r\n")] = _RARE_SHARE
            shares[END_PIECE + 1 :] = _RARE_SHARE  # tokens by name
        return shares * may_follow

    def _take_piece(self, rng: random.Random, shares: Any) -> bool:
        sums = np.cumsum(shares)
        token = int(np.searchsorted(sums, rng.random() * sums[-1], "right"))
        if token == END_PIECE:
            return True
        self._take_mark(token)
        return False

    def _leading_marks(self, may_follow: Any) -> Iterator[_Mark]:
        """Yield the marks that may follow, and after which other pieces may follow than now."""
        for mark in self._form.marks:
            if not may_follow[mark if isinstance(mark, int) else mark[0]]:
                continue
            ahead = self._matcher.fork()
            if _accepts(ahead, mark) and (self._followers(ahead) != may_follow).any():
                yield mark

    def _followers(self, matcher: Any) -> Any:
        """Return which tokens may follow, as booleans of shape (tokens,)."""
        bits = np.zeros((1, -(-len(self._form.tokens) // 32)), np.int32)
        matcher.fill_next_token_bitmask(bits)
        flags = np.unpackbits(bits.view(np.uint8).ravel(), bitorder="little")
        return flags[: len(self._form.tokens)].astype(bool)

    def _take_mark(self, mark: _Mark) -> None:
        if not _accepts(self._matcher, mark):
            raise _refusal("nothing may follow its beginning")
        self.text += self._form.tokens[mark] if isinstance(mark, int) else mark


def _accepts(matcher: Any, mark: _Mark) -> bool:
    """Return whether a mark may follow, and add it."""
    is_token = isinstance(mark, int)
    return bool(matcher.accept_token(mark) if is_token else matcher.accept_string(mark))


def _forced_text(matcher: Any) -> bytes:
    """Return what must follow; nothing if that ends within a character."""
    try:
        return str(matcher.find_jump_forward_string()).encode()
    except UnicodeDecodeError:
        return b""


@lru_cache(maxsize=64)
def _compiled_form(value: str) -> _CompiledForm:
    form = json.loads(value)
    if not isinstance(form, dict):
        raise _refusal("expected an object")
    marks, names = _marks(form), _token_names(form)
    form = _narrowed(form, marks)
    tokens = (*PIECES, b"<end>", *(name.encode() for name in names))
    compiler = _compiler(tokens)
    try:
        if "structures" in form:
            items = [
                xgrammar.StructuralTagItem(
                    begin=part["begin"], schema=json.dumps(part["schema"]), end=part["end"]
                )
                for part in form["structures"]
            ]
            grammar = compiler.compile_structural_tag(items, form["triggers"])
        else:
            grammar = compiler.compile_structural_tag(json.dumps(form))
    except RuntimeError as error:
        raise _refusal(str(error)) from error
    extra_tokens = range(END_PIECE + 1, len(tokens))
    return _CompiledForm(grammar, tokens, (*extra_tokens, *(mark.encode() for mark in marks)))


def _token_names(form: Any) -> list[str]:
    """Return the tokens that a form names; raises InvalidRequest if it names one by its id."""
    values = [value for field, value in _values(form) if field in _TOKEN_FIELDS]
    if not all(isinstance(value, str) for value in values):
        raise _refusal("it names a token by its id, expected its text")
    return sorted({*values})


@lru_cache(maxsize=8)
def _compiler(tokens: tuple[bytes, ...]) -> Any:
    info = xgrammar.TokenizerInfo([*tokens], stop_token_ids=[END_PIECE])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _narrowed(form: Any, marks: list[str]) -> Any:
    """Return the form with objects where it allows any JSON value, since those are arguments of
    tools, and without marks in free text, which then has a certain end.
    """
    if isinstance(form, list):
        return [_narrowed(part, marks) for part in form]
    if not isinstance(form, dict):
        return form
    match form.get("type"):
        case "json_schema":
            return {**form, "json_schema": _OBJECT} if form.get("json_schema") is True else form
        case "any_text" if not form.get("excludes"):
            return {**form, "excludes": marks}
    return {field: _narrowed(part, marks) for field, part in form.items()}


def _marks(form: Any) -> list[str]:
    """Return the texts among a form's marks, longest first."""
    texts = [value for field, value in _values(form) if field in _MARK_FIELDS]
    names = [_NAMED_MARK.format(name) for name in _property_names(form)]
    marks = {text for text in (*texts, *_STYLE_MARKS, *names) if text and isinstance(text, str)}
    return sorted(marks, key=lambda mark: (-len(mark), mark))


def _values(form: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a form with the name of its field, but none of a schema's."""
    if isinstance(form, list):
        for part in form:
            yield from _values(part, name)
    elif isinstance(form, dict):
        for field, part in form.items():
            if field not in ("json_schema", "schema"):
                yield from _values(part, field)
    else:
        yield name, form


def _property_names(form: Any) -> Iterator[str]:
    if isinstance(form, list):
        for part in form:
            yield from _property_names(part)
    elif isinstance(form, dict):
        for field, part in form.items():
            if field == "properties" and isinstance(part, dict):
                yield from part
            yield from _property_names(part)


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: the simulated engine finds no text: {why[:300]}")
