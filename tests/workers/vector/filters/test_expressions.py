"""Filters as JSON: what they allow, and how wrong ones are refused."""

import json
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from workers.vector.filters.filters import parse
from workers.vector.index.index import Index
from workers.vector.index.query import Effort

BOOKS: list[dict[str, str | bool | int | float]] = [
    {"language": "it", "year": 1980, "lent": True},
    {"language": "en", "year": 1999, "lent": False},
    {"language": "de", "year": 2024},
    {"year": 2025.5},
]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ({"language": "it"}, [0]),
        ({"lent": True}, [0]),
        ({"year": {"$gte": 1999, "$lt": 2025.5}}, [1, 2]),
        ({"year": {"$gt": 1999, "$lte": 2025.5}}, [2, 3]),
        ({"language": {"$in": ["it", "de"]}, "year": {"$gt": 2000}}, [2]),
        ({"language": {"$nin": ["it", "de"]}}, [1, 3]),
        ({"language": {"$ne": "it"}, "year": {"$eq": 1999}}, [1]),
        ({"$or": [{"language": "it"}, {"$not": {"year": {"$lt": 2025}}}]}, [0, 3]),
        ({"$and": [{"year": {"$gte": 1990}}, {"language": "en"}]}, [1]),
    ],
)
def test_json_filter_allows_matching_rows(expression: Any, expected: list[int]) -> None:
    index = Index.build([[i, 0] for i in range(4)], metadata=BOOKS)
    rows, _ = index.search([[0, 0]], Effort(k=4, where=parse(json.dumps(expression))))
    assert [row for row in rows[0].tolist() if row >= 0] == expected


def test_json_filter_accepts_many_parts() -> None:
    index = Index.build([[i, 0] for i in range(4)], metadata=BOOKS)
    text = json.dumps({"$or": [{"year": year} for year in [*range(1_100), 1999]]})
    rows, _ = index.search([[0, 0]], Effort(k=4, where=parse(text.replace(" ", ""))))
    assert [row for row in rows[0].tolist() if row >= 0] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object"),
        ("[" * 10_000, "expected a JSON object"),
        ("[]", "expected an object"),
        ("{}", "expected an object"),
        ('{"a": {}}', "a condition on each field"),
        ('{"a": [1]}', r"text, a number or a truth value, found \[1\]"),
        ('{"a": {"$like": 1}}', r"\$eq, \$ne, .* found '\$like'"),
        ('{"$xor": []}', r"\$and, \$or, \$not or the name of a field"),
        ('{"$or": []}', r"a list of expressions under \$or"),
        ('{"a": {"$in": 3}}', r"a list of values under \$in"),
        ('{"a": {"$gt": "x"}}', "a number, or a date such as .*, found 'x'"),
        ('{"a": {"$gt": NaN}}', "a number that a float can hold, found nan"),
        ('{"a": {"$lt": 1' + "0" * 400 + "}}", "a number that a float can hold, found 1000"),
        ('{"a": 1' + "0" * 400 + "}", "a number that a float can hold, found 1000"),
        ('{"$not":' * 20 + '{"a":1}' + "}" * 20, "at most 16 levels"),
        (json.dumps({"a": "x" * 20_000}), "at most 16384 characters"),
    ],
)
def test_parse_rejects_wrong_filter_with_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(text)
