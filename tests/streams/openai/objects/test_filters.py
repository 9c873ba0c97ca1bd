"""OpenAI's filters as ours."""

import json
import math
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from streams.openai.objects.filters import filter_text
from workers.vector.filters.filters import parse


def comparison(kind: str, value: Any, key: Any = "year") -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


@pytest.mark.parametrize(
    ("filters", "expression"),
    [
        (comparison("eq", 2020), {"year": {"$eq": 2020}}),
        (comparison("ne", "it"), {"year": {"$ne": "it"}}),
        (comparison("gte", 1.5), {"year": {"$gte": 1.5}}),
        (comparison("lt", 3), {"year": {"$lt": 3}}),
        (comparison("eq", True), {"year": {"$eq": True}}),
        (comparison("in", ["a", "b"]), {"year": {"$in": ["a", "b"]}}),
        (comparison("nin", [1]), {"year": {"$nin": [1]}}),
        (comparison("gte", "2024-05-31"), {"year": {"$gte": "2024-05-31"}}),
        (comparison("exists", False), {"year": {"$exists": False}}),
        (comparison("contains", "a"), {"year": {"$contains": "a"}}),
        (comparison("contains_any", ["a", 1]), {"year": {"$contains_any": ["a", 1]}}),
        (comparison("contains_all", ["a"]), {"year": {"$contains_all": ["a"]}}),
        (
            {
                "type": "and",
                "filters": [comparison("gt", 1), {"type": "or", "filters": [comparison("eq", 2)]}],
            },
            {"$and": [{"year": {"$gt": 1}}, {"$or": [{"year": {"$eq": 2}}]}]},
        ),
    ],
)
def test_filter_text_translates_openai_filter(filters: Any, expression: Any) -> None:
    text = filter_text(filters)
    assert json.loads(text) == expression
    parse(text)


def test_filter_text_is_empty_without_filter() -> None:
    assert filter_text(None) == ""


def deep(levels: int) -> dict[str, Any]:
    nested_filter = comparison("eq", 1)
    for _ in range(levels):
        nested_filter = {"type": "and", "filters": [nested_filter]}
    return nested_filter


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({}, "filters: expected a type of and, or, eq"),
        ([], "filters: expected an object such as"),
        (
            comparison("like", 1),
            "or, eq, ne, gt, gte, lt, lte, in, nin, contains_any, .*exists, found 'like'",
        ),
        (comparison("eq", None), "expected a text, a number or a truth value, found None"),
        (
            comparison("gt", "a"),
            "expected a number or a date in ISO 8601 in a filter of type gt, found",
        ),
        (comparison("exists", 1), "expected true or false in a filter of type exists, found 1"),
        (comparison("contains_all", "a"), "expected a list of texts or numbers"),
        (comparison("in", "a"), "expected a list of texts or numbers in a filter of type in"),
        (comparison("in", [{}]), "expected a list of texts or numbers"),
        (comparison("eq", 1, key=""), "the name of an attribute as key"),
        (comparison("eq", 1, key="$tenant"), "the name of an attribute as key"),
        (comparison("eq", 1, key=7), "the name of an attribute as key"),
        ({**comparison("eq", 1), "more": 1}, "type, key, value and nothing else, found 'more'"),
        ({"type": "and", "filters": []}, "a list of filters in one of type and"),
        ({"type": "or", "filters": [1]}, "an object such as"),
        (deep(16), "at most 16 levels"),
        ({"type": "and", "filters": [comparison("eq", 1)] * 1_000}, "at most 16384 characters"),
        (comparison("lt", math.nan), "a number that a float can hold, found nan"),
        (comparison("in", [10**400]), "a number that a float can hold, found 1000"),
    ],
)
def test_filter_text_rejects_invalid_filter(filters: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("(", r"\(")):
        filter_text(filters)
