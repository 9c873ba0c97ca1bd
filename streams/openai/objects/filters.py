"""Converts OpenAI's filters over attributes to filter expressions of `schemas.rules.filters`."""

import json
from collections.abc import Mapping
from typing import Any

from schemas.errors import InvalidRequest
from schemas.rules import filters
from streams.calls.errors import shorten

_COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte")
_OF_LISTS = ("in", "nin", "contains_any", "contains_all")
COMPARISONS = (*_COMPARISONS, *_OF_LISTS, "contains", "exists")


def filter_text(attribute_filter: Mapping[str, Any] | None, where: str = "filters") -> str:
    """Return the expression of a filter, or an empty text without one; raises InvalidRequest.

    `where` is the filter's field in the body.
    """
    if attribute_filter is None:
        return ""
    try:
        text = json.dumps(_expression(attribute_filter, filters.DEPTH_MAX), ensure_ascii=False)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}", where) from error
    filters.parse(text)
    return text


def _expression(node: Any, depth: int) -> dict[str, Any]:
    if not depth:
        raise _wrong(f"at most {filters.DEPTH_MAX} levels", "more")
    if not isinstance(node, dict):
        raise _wrong('an object such as {"type": "eq", "key": "year", "value": 2020}', node)
    kind = node.get("type")
    if kind in ("and", "or"):
        _only(node, "type", "filters")
        parts = node.get("filters")
        if not isinstance(parts, list) or not parts:
            raise _wrong(f"a list of filters in one of type {kind}", parts)
        return {f"${kind}": [_expression(part, depth - 1) for part in parts]}
    if kind not in COMPARISONS:
        raise _wrong(f"a type of and, or, {', '.join(COMPARISONS)}", kind)
    _only(node, "type", "key", "value")
    return {_key(node.get("key")): {f"${kind}": _value(kind, node.get("value"))}}


def _only(node: Mapping[str, Any], *names: str) -> None:
    for name in node:
        if name not in names:
            raise _wrong(f"{', '.join(names)} and nothing else", name)


def _key(key: Any) -> str:
    if not isinstance(key, str) or not key or key.startswith("$"):
        raise _wrong("the name of an attribute as key", key)
    return key


def _value(kind: str, value: Any) -> Any:
    if kind == "exists":
        if not isinstance(value, bool):
            raise _wrong("true or false in a filter of type exists", value)
        return value
    if kind in _OF_LISTS:
        if not isinstance(value, list) or not all(isinstance(v, str | int | float) for v in value):
            raise _wrong(f"a list of texts or numbers in a filter of type {kind}", value)
        return value
    if not isinstance(value, str | int | float):
        raise _wrong("a text, a number or a truth value", value)
    is_date = isinstance(value, str) and filters.moment_us(value) is not None
    if kind[0] in "gl" and isinstance(value, str | bool) and not is_date:
        raise _wrong(f"a number or a date in ISO 8601 in a filter of type {kind}", value)
    return value


def _wrong(expected: str, value: Any) -> ValueError:
    return ValueError(f"expected {expected}, found {shorten(value)}")
