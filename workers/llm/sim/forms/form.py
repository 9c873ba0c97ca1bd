"""Generates the text of an answer with a constrained form from a seed. Pure.

The same constraint and seed give the same text, in every attempt and on every worker. A validator
with bounded work checks values of a JSON schema. Texts for patterns are generated to match, and are
not matched again.
"""

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jsonschema import (  # type: ignore[import-untyped]  # ships no types
    Draft7Validator,
    Draft202012Validator,
    SchemaError,
    ValidationError,
)
from jsonschema.validators import extend  # type: ignore[import-untyped]  # the same
from referencing import Registry
from referencing.exceptions import Unresolvable

from schemas.errors import InvalidRequest
from schemas.records import Structured, StructuredKind
from workers.llm.sim.forms import pattern
from workers.llm.sim.forms.schema_values import SchemaValues

_TRIES = 24  # generated values per schema
_STEPS_MAX = 20_000  # of the validator, for one value
_UNMATCHED = ("pattern", "patternProperties")  # a caller's pattern may take unbounded time
# Errors of a schema or list that is malformed or contradicts itself.
_UNREADABLE = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError,
    SchemaError, Unresolvable,
)  # fmt: skip
_OBJECT = '{"type": "object", "minProperties": 1}'


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
        case StructuredKind.REGEX:
            return pattern.draw(structured.value, rng)
        case StructuredKind.JSON_OBJECT:
            return _draw_value(_OBJECT, rng)
        case StructuredKind.JSON_SCHEMA:
            return _draw_value(structured.value, rng)
    raise InvalidRequest(
        f"response_format: the simulated engine knows no form {structured.kind}; leave it out, or "
        "start workers with --engine vllm"
    )


def _draw_value(text: str, rng: random.Random) -> str:
    schema, validator = _read(text)
    for _ in range(_TRIES):
        value = SchemaValues(schema, rng).draw()
        if validator.is_valid(value):
            return json.dumps(value, ensure_ascii=False)
    raise InvalidRequest(f"the simulated engine found no valid value in {_TRIES} draws")


@lru_cache(maxsize=256)
def _read(text: str) -> tuple[Any, "_BoundedValidator"]:
    return json.loads(text), _BoundedValidator(text)


class _BoundedValidator:
    """A validator with at most `_STEPS_MAX` steps that fetches no references and matches no
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
        self._steps_left = 0
        counted = {
            name: self._count_steps(check) if name not in _UNMATCHED else None
            for name, check in kind.VALIDATORS.items()
        }
        self._validator = extend(kind, counted)(schema, registry=Registry())

    def is_valid(self, value: Any) -> bool:
        """Return whether the value is valid; raises InvalidRequest after too many steps."""
        self._steps_left = _STEPS_MAX
        return bool(self._validator.is_valid(value))

    def _count_steps(self, check: Any) -> Any:
        def bounded(*arguments: Any) -> Iterator[ValidationError]:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise InvalidRequest("the simulated engine knows no schema as large as this one")
            return check(*arguments) or iter(())

        return bounded
