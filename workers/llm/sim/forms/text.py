"""Generates the text of an answer with a constrained form from a seed. Pure.

llguidance tells which bytes and words may follow a text, or xgrammar for structural tags
(`tags.py`); this module draws among them. vLLM constrains answers with both, so a schema, pattern
or grammar means the same here. llguidance ignores some keywords of schemas (`not`, `if`,
`uniqueItems`); a validator with bounded work checks values, and another one is drawn. The same
constraint and seed give the same text, in every attempt and on every worker.
"""

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from jsonschema import (  # type: ignore[import-untyped]  # ships no types
    Draft7Validator,
    Draft202012Validator,
    SchemaError,
    ValidationError,
)
from jsonschema.validators import extend  # type: ignore[import-untyped]  # the same
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from referencing import Registry
from referencing.exceptions import Unresolvable

from schemas.errors import InvalidRequest
from schemas.records import Structured, StructuredKind
from workers.llm.sim.forms.pieces import (
    EARLY_SHARES,
    END_PIECE,
    LATE_SHARES,
    LATE_STEPS,
    PIECES,
    STEPS_MAX,
)

_TRIES = 24  # generated values per schema
_CHECKS_MAX = 20_000  # of the validator, for one value
_UNMATCHED = ("pattern", "patternProperties")  # a caller's pattern may take unbounded time
# Errors of a schema or list that is malformed or contradicts itself.
_UNREADABLE = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError,
    SchemaError, Unresolvable,
)  # fmt: skip
_COMPACT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
    "lenient": True,
}
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_VALUES = ("const", "enum", "default", "examples")  # keywords with values, not with schemas
_OBJECT = '{"type": "object", "minProperties": 1}'


class _TextPieces:
    """The pieces as llguidance wants a tokenizer."""

    tokens = [*PIECES, b"<end>"]
    eos_token_id = END_PIECE
    bos_token_id = None
    special_token_ids = [END_PIECE]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_TOKENIZER = LLTokenizer(TokenizerWrapper(_TextPieces()), slices=[])


def draw_text(structured: Structured, seed: int) -> str:
    """Return a text of this form; raises InvalidRequest if this engine finds none."""
    try:
        text = _draw(structured, random.Random(seed))
        text.encode()
    except _UNREADABLE as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise InvalidRequest(
            f"response_format: the simulated engine cannot draw from this {structured.kind}: {what}"
        ) from error
    return text


def _draw(structured: Structured, rng: random.Random) -> str:
    match structured.kind:
        case StructuredKind.CHOICE:
            return str(rng.choice(json.loads(structured.value)))
        case StructuredKind.JSON_OBJECT:
            return _draw_value(_OBJECT, rng)
        case StructuredKind.JSON_SCHEMA:
            return _draw_value(structured.value, rng)
        case StructuredKind.STRUCTURAL_TAG:
            return _draw_tags(structured.value, rng)
    return _draw_match(_matcher(structured.kind, structured.value), rng)


def _draw_tags(value: str, rng: random.Random) -> str:
    try:
        # Imports xgrammar, and so torch, which no other form needs.
        from workers.llm.sim.forms.tags import draw_tags
    except ModuleNotFoundError as error:
        raise _refusal(f"structural tags need {error.name}, which comes with vLLM") from error
    return draw_tags(value, rng)


def _draw_value(schema: str, rng: random.Random) -> str:
    validator, matcher = _validator(schema), _matcher(StructuredKind.JSON_SCHEMA, schema)
    for _ in range(_TRIES):
        text = _draw_match(matcher, rng)
        if validator.is_valid(json.loads(text)):
            return text
    raise InvalidRequest(f"the simulated engine found no valid value in {_TRIES} draws")


def _draw_match(matcher: LLMatcher, rng: random.Random) -> str:
    matcher, text = matcher.deep_copy(), bytearray()
    for step in range(STEPS_MAX):
        may_follow = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: END_PIECE + 1] > 0
        shares = np.cumsum((LATE_SHARES if step >= LATE_STEPS else EARLY_SHARES) * may_follow)
        token = int(np.searchsorted(shares, rng.random() * shares[-1], "right"))
        if token == END_PIECE and matcher.is_accepting():
            return text.decode()
        text += _TextPieces.tokens[token]
        matcher.consume_token(token)
        forced = matcher.compute_ff_bytes()
        text += forced
        if matcher.is_error() or not matcher.consume_tokens(list(forced)):
            break
    raise _refusal(matcher.get_error() or "its texts are too long")


@lru_cache(maxsize=64)
def _matcher(kind: StructuredKind, value: str) -> LLMatcher:
    """Return the matcher of a form in its first state; draws copy it."""
    if kind is StructuredKind.JSON_SCHEMA:
        closed = _compile(_json_grammar(json.dumps(_closed(json.loads(value)))))
        if not closed.is_error():
            return closed
        grammar = _json_grammar(value)
    else:
        grammar = grammar_from("regex" if kind is StructuredKind.REGEX else "grammar", value)
    matcher = _compile(grammar)
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return matcher


def _compile(grammar: str) -> LLMatcher:
    return LLMatcher(_TOKENIZER, grammar, log_level=0, limits=_LIMITS)


def _json_grammar(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)


def _closed(schema: Any) -> Any:
    """Return the schema without properties that it allows but does not name: answers are short."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: part if key in _VALUES else _closed(part) for key, part in schema.items()}
    return {"additionalProperties": False, **parts} if "properties" in parts else parts


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: the simulated engine finds no text: {why[:300]}")


@lru_cache(maxsize=64)
def _validator(text: str) -> "_BoundedValidator":
    return _BoundedValidator(text)


class _BoundedValidator:
    """A validator with at most `_CHECKS_MAX` checks that fetches no references and matches no
    patterns.
    """

    def __init__(self, text: str) -> None:
        schema = json.loads(text)
        if "patternProperties" in text:
            raise InvalidRequest("the simulated engine knows no patternProperties")
        kind = Draft202012Validator
        try:
            kind.check_schema(schema)
        except SchemaError:
            kind = Draft7Validator
            kind.check_schema(schema)
        self._checks_left = 0
        counted = {
            name: self._count_checks(check) if name not in _UNMATCHED else None
            for name, check in kind.VALIDATORS.items()
        }
        self._validator = extend(kind, counted)(schema, registry=Registry())

    def is_valid(self, value: Any) -> bool:
        """Return whether the value is valid; raises InvalidRequest after too many checks."""
        self._checks_left = _CHECKS_MAX
        return bool(self._validator.is_valid(value))

    def _count_checks(self, check: Any) -> Any:
        def bounded(*arguments: Any) -> Iterator[ValidationError]:
            self._checks_left -= 1
            if self._checks_left < 0:
                raise InvalidRequest("the simulated engine knows no schema as large as this one")
            return check(*arguments) or iter(())

        return bounded
