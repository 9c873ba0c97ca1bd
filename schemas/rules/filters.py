"""Parses filters over metadata: JSON with the operators that vector databases share.

`{"language": "it", "year": {"$gte": 2020, "$lt": 2025}, "tags": {"$in": ["a", "b"]}}` is true if
all three are. `{"$or": [..., ...]}`, `{"$and": [..., ...]}` and `{"$not": ...}` combine filters.
Operators of a field are `$eq`, `$ne`, `$in`, `$nin`, `$contains`, `$contains_any`, `$contains_all`,
`$gt`, `$gte`, `$lt`, `$lte` and `$exists`; null stands for a missing value. Ranges are of numbers,
or of dates in ISO 8601. A list in metadata is several values of its field: a condition is true if
it is true for one of them.

Gateways check filters with this, and retrieval workers evaluate the result of `parse`.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from schemas.errors import InvalidRequest
from schemas.rules.numbers import float_of

LENGTH_MAX = 16_384
DEPTH_MAX = 16
LIST_MAX = 1_024  # values of a row in one field
Value = str | bool | int | float
_OF_FIELDS = (
    "$eq", "$ne", "$in", "$nin", "$contains", "$contains_any", "$contains_all", "$gt", "$gte",
    "$lt", "$lte", "$exists",
)  # fmt: skip
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d(:\d\d([.,]\d{1,9})?)?([Zz]|[+-]\d\d(:?[0-5]\d)?)?)?", re.ASCII
)
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class FieldIn:
    """A field has one of these values."""

    field: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A field has a number in [low, high]; None leaves a side open."""

    field: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class DateRange:
    """A field has a date in [low, high], in microseconds since 1970; None leaves a side open."""

    field: str
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class FieldExists:
    """A field has a value."""

    field: str


@dataclass(frozen=True, slots=True)
class Not:
    """A condition is not true."""

    inner: "Condition"


@dataclass(frozen=True, slots=True)
class All:
    """All of these conditions are true; with `is_any`, at least one."""

    parts: tuple["Condition", ...]
    is_any: bool = False


Condition = FieldIn | NumberRange | DateRange | FieldExists | Not | All


def parse(text: str) -> Condition:
    """Return the condition of a JSON expression. Raise InvalidRequest with what was expected."""
    if len(text) > LENGTH_MAX:
        raise _wrong(f"at most {LENGTH_MAX} characters", len(text))
    try:
        tree = json.loads(text, parse_float=float_of)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"filter: expected a JSON object: {error}", "filter") from error
    return _expression(tree, DEPTH_MAX)


def text_of(expression: object) -> str:
    """Return an expression, given as text or as an object, as text; empty for none.

    Every process that accepts a filter calls this, so that callers get errors at once. Raises
    InvalidRequest.
    """
    if expression is None or expression == "":
        return ""
    try:
        text = (
            expression
            if isinstance(expression, str)
            else json.dumps(expression, ensure_ascii=False)
        )
    except TypeError as error:  # TOML has dates
        raise InvalidRequest(
            f"filter: expected texts, numbers, lists and objects, dates as texts: {error}", "filter"
        ) from error
    parse(text)
    return text


def moment_us(text: str) -> int | None:
    """Return the microseconds since 1970 of a date in ISO 8601; None for other texts.

    Without a time it is the day's first moment; without an offset it is in UTC.
    """
    if not _DATE.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text.upper())
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def _expression(node: Any, depth: int) -> Condition:
    if not isinstance(node, dict) or not node:
        raise _wrong('an object such as {"language": "it"}', node)
    if not depth:
        raise _wrong(f"at most {DEPTH_MAX} levels", "more")
    parts: list[Condition] = []
    for name, value in node.items():
        if name in ("$and", "$or"):
            if not isinstance(value, list) or not value:
                raise _wrong(f"a list of expressions under {name}", value)
            joined = tuple(_expression(part, depth - 1) for part in value)
            parts.append(All(joined, is_any=name == "$or"))
        elif name == "$not":
            parts.append(Not(_expression(value, depth - 1)))
        elif name.startswith("$"):
            raise _wrong("$and, $or, $not or the name of a field", name)
        elif isinstance(value, dict):
            if not value:
                raise _wrong("a condition on each field", node)
            parts += [_condition(name, operator, operand) for operator, operand in value.items()]
        else:
            parts.append(_equal(name, value))
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _condition(field: str, name: str, value: Any) -> Condition:
    match name:
        case "$eq":
            return _equal(field, value)
        case "$ne":
            return Not(_equal(field, value))
        case "$contains":
            return FieldIn(field, (_value(value),))
        case "$in" | "$contains_any":
            return FieldIn(field, _values(name, value))
        case "$nin":
            return Not(FieldIn(field, _values(name, value)))
        case "$contains_all":
            values = _values(name, value)
            if not 0 < len(values) <= LIST_MAX:
                raise _wrong(f"1 to {LIST_MAX} values under {name}", len(values))
            return All(tuple(FieldIn(field, (element,)) for element in values))
        case "$gt" | "$gte" | "$lt" | "$lte":
            return _range(field, name, value)
        case "$exists":
            if not isinstance(value, bool):
                raise _wrong("true or false under $exists", value)
            return FieldExists(field) if value else Not(FieldExists(field))
    raise _wrong(f"{', '.join(_OF_FIELDS[:-1])} or {_OF_FIELDS[-1]}", name)


def _equal(field: str, value: Any) -> Condition:
    return Not(FieldExists(field)) if value is None else FieldIn(field, (_value(value),))


def _range(field: str, name: str, value: Any) -> Condition:
    is_low, is_open = name[1] == "g", name[-1] != "e"
    if isinstance(value, str):
        if (at_us := moment_us(value)) is None:
            raise _wrong(f"a number, or a date such as 2024-05-31T12:00:00Z, under {name}", value)
        at_us += is_open * (1 if is_low else -1)
        return DateRange(field, low=at_us) if is_low else DateRange(field, high=at_us)
    edge = _number(value)
    if is_open:
        edge = math.nextafter(edge, math.inf if is_low else -math.inf)
    return NumberRange(field, low=edge) if is_low else NumberRange(field, high=edge)


def _values(name: str, value: Any) -> tuple[Value, ...]:
    if not isinstance(value, list):
        raise _wrong(f"a list of values under {name}", value)
    return tuple(map(_value, value))


def _value(value: Any) -> Value:
    if not isinstance(value, str | bool | int | float):
        raise _wrong("text, a number or a truth value", value)
    return value if isinstance(value, str | bool) else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("a number", value)
    if not abs(value) <= sys.float_info.max:  # nor NaN
        raise _wrong("a number that a float can hold", value)
    # A number that no float equals is beyond all numbers of metadata, which are within 2**53.
    return number if (number := float(value)) == value else math.copysign(math.inf, value)


def _wrong(expected: str, actual: Any) -> InvalidRequest:
    return InvalidRequest(f"filter: expected {expected}, found {actual!r:.80}", "filter")
