"""Filters as JSON, in the operators that vector databases share.

`{"language": "it", "year": {"$gte": 2020, "$lt": 2025}, "source": {"$in": ["a", "b"]}}` holds where
all three do. `{"$or": [..., ...]}`, `{"$and": [..., ...]}` and `{"$not": ...}` combine expressions;
of one field, `$eq`, `$ne`, `$in`, `$nin`, `$gt`, `$gte`, `$lt` and `$lte` are known.
"""

import functools
import json
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

from schemas.errors import InvalidRequest
from workers.search.index.columns import Value, is_number
from workers.search.index.filters import Equal, Filter, OneOf, Range

LENGTH_MAX = 16_384
DEPTH_MAX = 16


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Filter:
    """The filter of a JSON expression; raises InvalidRequest saying what was expected."""
    if len(text) > LENGTH_MAX:
        raise _wrong(f"at most {LENGTH_MAX} characters", len(text))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"filter: expected a JSON object: {error}", "filter") from error
    return _expression(found, DEPTH_MAX)


def _expression(node: Any, depth: int) -> Filter:
    if not isinstance(node, dict) or not node:
        raise _wrong('an object such as {"language": "it"}', node)
    if not depth:
        raise _wrong(f"at most {DEPTH_MAX} levels", "more")
    parts: list[Filter] = []
    for name, value in node.items():
        if name in _JOINS:
            if not isinstance(value, list) or not value:
                raise _wrong(f"a list of expressions under {name}", value)
            joined = [_expression(each, depth - 1) for each in value]
            parts.append(_joined(_JOINS[name], joined))
        elif name == "$not":
            parts.append(~_expression(value, depth - 1))
        elif name.startswith("$"):
            raise _wrong("$and, $or, $not or the name of a field", name)
        elif isinstance(value, dict):
            parts += [_condition(name, each, given) for each, given in value.items()]
        else:
            parts.append(Equal(name, _value(value)))
    if not parts:
        raise _wrong("a condition on each field", node)
    return _joined(operator.and_, parts)


def _joined(join: Callable[[Filter, Filter], Filter], parts: list[Filter]) -> Filter:
    """A tree of them all, as flat as can be: whoever walks it recurses."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(_joined(join, parts[:middle]), _joined(join, parts[middle:]))


_JOINS: dict[str, Callable[[Filter, Filter], Filter]] = {
    "$and": operator.and_,
    "$or": operator.or_,
}


def _condition(field: str, name: str, value: Any) -> Filter:
    match name:
        case "$eq":
            return Equal(field, _value(value))
        case "$ne":
            return ~Equal(field, _value(value))
        case "$in" | "$nin":
            if not isinstance(value, list):
                raise _wrong(f"a list of values under {name}", value)
            found = OneOf(field, [_value(each) for each in value])
            return found if name == "$in" else ~found
        case "$gte":
            return Range(field, low=_number(value))
        case "$lte":
            return Range(field, high=_number(value))
        case "$gt":
            return Range(field, low=math.nextafter(_number(value), math.inf))
        case "$lt":
            return Range(field, high=math.nextafter(_number(value), -math.inf))
    raise _wrong("$eq, $ne, $in, $nin, $gt, $gte, $lt or $lte", name)


def _value(value: Any) -> Value:
    if not isinstance(value, str | bool | int | float):
        raise _wrong("text, a number or a truth value", value)
    return _number(value) if is_number(value) else value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("a number", value)
    if not abs(value) <= sys.float_info.max:  # nor NaN
        raise _wrong("a number that a float can hold", value)
    return float(value)


def _wrong(expected: str, found: Any) -> InvalidRequest:
    return InvalidRequest(f"filter: expected {expected}, found {found!r:.80}", "filter")
