"""OpenAI's filters over attributes, as our filter expressions."""

import json
from collections.abc import Mapping
from typing import Any

from schemas.errors import InvalidRequest
from streams.gateway.http.errors import shown

DEPTH_MAX = 8
PARTS_MAX = 256  # of one filter
_COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")


def filter_text(filters: Mapping[str, Any] | None) -> str:
    """The expression of a filter, empty for none; raises InvalidRequest."""
    if filters is None:
        return ""
    return json.dumps(_expression(filters, DEPTH_MAX, [PARTS_MAX]), ensure_ascii=False)


def _expression(node: Any, depth: int, left: list[int]) -> dict[str, Any]:
    left[0] -= 1
    if not depth or left[0] < 0:
        raise _wrong(f"at most {DEPTH_MAX} levels and {PARTS_MAX} parts", "more")
    if not isinstance(node, dict):
        raise _wrong('an object such as {"type": "eq", "key": "year", "value": 2020}', node)
    kind = node.get("type")
    if kind in ("and", "or"):
        _only(node, "type", "filters")
        parts = node.get("filters")
        if not isinstance(parts, list) or not parts:
            raise _wrong(f"a list of filters in one of type {kind}", parts)
        return {f"${kind}": [_expression(each, depth - 1, left) for each in parts]}
    if kind not in _COMPARISONS:
        raise _wrong(f"a type of and, or, {', '.join(_COMPARISONS)}", kind)
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
    if kind in ("in", "nin"):
        if not isinstance(value, list) or not all(isinstance(v, str | int | float) for v in value):
            raise _wrong(f"a list of texts or numbers in a filter of type {kind}", value)
        return value
    if not isinstance(value, str | int | float):
        raise _wrong("a text, a number or a truth value", value)
    if kind[0] in "gl" and (isinstance(value, str | bool)):
        raise _wrong(f"a number in a filter of type {kind}", value)
    return value


def _wrong(expected: str, found: Any) -> InvalidRequest:
    return InvalidRequest(f"filters: expected {expected}, found {shown(found)}", "filters")
