"""OpenAI's filters as ours."""

import json
import math
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from streams.gateway.objects.filters import filter_text
from workers.search.metadata.expressions import parse


def one(kind: str, value: Any, key: Any = "year") -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


@pytest.mark.parametrize(
    ("filters", "expression"),
    [
        (one("eq", 2020), {"year": {"$eq": 2020}}),
        (one("ne", "it"), {"year": {"$ne": "it"}}),
        (one("gte", 1.5), {"year": {"$gte": 1.5}}),
        (one("lt", 3), {"year": {"$lt": 3}}),
        (one("eq", True), {"year": {"$eq": True}}),
        (one("in", ["a", "b"]), {"year": {"$in": ["a", "b"]}}),
        (one("nin", [1]), {"year": {"$nin": [1]}}),
        (one("gte", "2024-05-31"), {"year": {"$gte": "2024-05-31"}}),
        (one("exists", False), {"year": {"$exists": False}}),
        (one("contains", "a"), {"year": {"$contains": "a"}}),
        (one("contains_any", ["a", 1]), {"year": {"$contains_any": ["a", 1]}}),
        (one("contains_all", ["a"]), {"year": {"$contains_all": ["a"]}}),
        (
            {"type": "and", "filters": [one("gt", 1), {"type": "or", "filters": [one("eq", 2)]}]},
            {"$and": [{"year": {"$gt": 1}}, {"$or": [{"year": {"$eq": 2}}]}]},
        ),
    ],
)
def test_a_filter_is_an_expression_that_the_pool_understands(filters: Any, expression: Any) -> None:
    text = filter_text(filters)
    assert json.loads(text) == expression
    parse(text)


def test_no_filter_is_no_expression() -> None:
    assert filter_text(None) == ""


def deep(levels: int) -> dict[str, Any]:
    found = one("eq", 1)
    for _ in range(levels):
        found = {"type": "and", "filters": [found]}
    return found


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({}, "filters: expected a type of and, or, eq"),
        ([], "filters: expected an object such as"),
        (
            one("like", 1),
            "or, eq, ne, gt, gte, lt, lte, in, nin, contains_any, .*exists, found 'like'",
        ),
        (one("eq", None), "expected a text, a number or a truth value, found None"),
        (one("gt", "a"), "expected a number or a date in ISO 8601 in a filter of type gt, found"),
        (one("exists", 1), "expected true or false in a filter of type exists, found 1"),
        (one("contains_all", "a"), "expected a list of texts or numbers"),
        (one("in", "a"), "expected a list of texts or numbers in a filter of type in"),
        (one("in", [{}]), "expected a list of texts or numbers"),
        (one("eq", 1, key=""), "the name of an attribute as key"),
        (one("eq", 1, key="$tenant"), "the name of an attribute as key"),
        (one("eq", 1, key=7), "the name of an attribute as key"),
        ({**one("eq", 1), "more": 1}, "type, key, value and nothing else, found 'more'"),
        ({"type": "and", "filters": []}, "a list of filters in one of type and"),
        ({"type": "or", "filters": [1]}, "an object such as"),
        (deep(16), "at most 16 levels"),
        ({"type": "and", "filters": [one("eq", 1)] * 1_000}, "at most 16384 characters"),
        (one("lt", math.nan), "a number that a float can hold, found nan"),
        (one("in", [10**400]), "a number that a float can hold, found 1000"),
    ],
)
def test_what_is_no_filter_is_refused(filters: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("(", r"\(")):
        filter_text(filters)
