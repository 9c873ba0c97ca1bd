"""Generates the text of an answer with a constrained form from a seed. Pure.

llguidance, one of the libraries with which vLLM constrains answers, tells which bytes and words may
follow a text; this module draws among them. So a schema, pattern or grammar means the same here as
behind vLLM. The library ignores some keywords of schemas (`not`, `if`, `uniqueItems`); a validator
with bounded work checks values, and another one is drawn. The same constraint and seed give the
same text, in every attempt and on every worker.
"""

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from string import ascii_letters, digits
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
from workers.models.sim import WORDS

_TRIES = 24  # generated values per schema
_STEPS_MAX = 4_000  # bytes and words of one text
_LATE = 60  # steps after which a text ends as soon as it can
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
    """What a step may add, as llguidance wants a tokenizer: a byte, or a word."""

    words = [word.encode() for word in WORDS if len(word) > 1]
    tokens = [*(bytes([byte]) for byte in range(256)), *words, *(b" " + word for word in words)]
    eos_token_id = len(tokens)
    tokens.append(b"<end>")
    bos_token_id = None
    special_token_ids = [eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_END = _TextPieces.eos_token_id
_TOKENIZER = LLTokenizer(TokenizerWrapper(_TextPieces()), slices=[])


def _weights(*, late: bool) -> Any:
    """Return how likely each token is among those that may follow, shape (tokens,)."""
    weights = np.full(_END + 1, 0.1)  # words, and what no row names
    weights[:256] = 1e-6  # bytes of other scripts, control characters, escapes
    rows = ((ascii_letters + digits + "\n -_.;/:{[", 0.1), ("eE", 0.02), (",}]@", 0.5), ('"', 20.0))
    for chars, share in rows:
        weights[list(chars.encode())] = share
    if late:
        weights[256:] = 1e-3
        weights[list(b"\n-_.,;/@:")] = 1.0
        weights[list(b"{[")] = 1e-4
        weights[[*b'"}]', _END]] = 1_000.0
    return weights


_EARLY_WEIGHTS, _LATE_WEIGHTS = _weights(late=False), _weights(late=True)


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
    return _draw_match(_matcher(structured.kind, structured.value), rng)


def _draw_value(schema: str, rng: random.Random) -> str:
    validator, matcher = _validator(schema), _matcher(StructuredKind.JSON_SCHEMA, schema)
    for _ in range(_TRIES):
        text = _draw_match(matcher, rng)
        if validator.is_valid(json.loads(text)):
            return text
    raise InvalidRequest(f"the simulated engine found no valid value in {_TRIES} draws")


def _draw_match(matcher: LLMatcher, rng: random.Random) -> str:
    matcher, text = matcher.deep_copy(), bytearray()
    for step in range(_STEPS_MAX):
        may_follow = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: _END + 1] > 0
        weights = (_LATE_WEIGHTS if step >= _LATE else _EARLY_WEIGHTS) * may_follow
        shares = np.cumsum(weights)
        token = int(np.searchsorted(shares, rng.random() * shares[-1], "right"))
        if token == _END and matcher.is_accepting():
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
