"""The grammar of filters: dates, and what a gateway refuses already."""

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest
from schemas.rules.filters import (
    All,
    DateRange,
    FieldExists,
    FieldIn,
    Not,
    NumberRange,
    moment_us,
    parse,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01", 0),
        ("1970-01-02T00:00:00Z", 86_400_000_000),
        ("1970-01-01T00:00:00.000001", 1),
        ("1970-01-01 00:00:00,5", 500_000),
        ("1970-01-01t01:00:00+01:00", 0),
        ("1970-01-01T00:00-0100", 3_600_000_000),
        ("1969-12-31T23:59:59.999999z", -1),
        ("0001-01-01T00:00:00+14:00", -62_135_596_800_000_000 - 14 * 3_600_000_000),
        ("2024-05-31T12:00:00.123456789Z", 1_717_156_800_123_456),
    ],
)
def test_dates_default_to_utc(text: str, expected: int) -> None:
    assert moment_us(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "2024", "20240531", "2024-W22-5", "2024-13-01", "2023-02-29", "2024-05-31T25:00", "today",
     "2024-05-31T12:00:00Z and more", "2024-05-31T12:00+02:60", "2016-12-31T23:59:60Z",
     " 2024-05-31", "0000-01-01", "٢٠٢٤-05-31"],
)  # fmt: skip
def test_invalid_dates_have_no_moment(text: str) -> None:
    assert moment_us(text) is None


@given(st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=-5, minutes=30)))))
def test_moment_reads_any_date_written_by_python(moment: datetime) -> None:
    expected = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert moment_us(moment.isoformat()) == expected


def test_filter_parses_expressions() -> None:
    assert parse('{"a": null}') == parse('{"a": {"$exists": false}}') == Not(FieldExists("a"))
    assert parse('{"a": {"$ne": null}}') == Not(Not(FieldExists("a")))
    assert parse('{"a": {"$contains": "x"}}') == parse('{"a": "x"}') == FieldIn("a", ("x",))
    assert parse('{"a": {"$contains_any": [1, 2]}}') == FieldIn("a", (1.0, 2.0))
    conditions = (FieldIn("a", ("x",)), FieldIn("a", ("y",)))
    assert parse('{"a": {"$contains_all": ["x", "y"]}}') == All(conditions)
    assert parse('{"a": {"$gte": "1970-01-01"}}') == DateRange("a", low=0)
    assert parse('{"a": {"$lt": "1970-01-01"}}') == DateRange("a", high=-1)
    assert parse('{"a": {"$gt": "1970-01-01", "$lte": 5}}') == All(
        (DateRange("a", low=1), NumberRange("a", high=5.0))
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_filter_treats_number_beyond_floats_as_unreachable(sign: int) -> None:
    """Rounding would turn 2**53 + 1 into 2**53, which a row may have."""
    edge, far, last = sign * (2**53 + 1), sign * math.inf, float(sign * 2**53)
    assert parse(f'{{"a": {edge}}}') == FieldIn("a", (far,))
    for name in ("$gt", "$gte", "$lt", "$lte"):
        condition = parse(f'{{"a": {{"{name}": {edge}}}}}')
        assert isinstance(condition, NumberRange)
        holds = (condition.low or last) <= last <= (condition.high or last)
        assert holds == (("g" in name) == (sign < 0))
    with pytest.raises(InvalidRequest, match="that a float can hold, found 1000"):
        parse(f'{{"a": {10**400}}}')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": {"$exists": 1}}', r"true or false under \$exists, found 1"),
        ('{"a": {"$contains": ["x"]}}', "text, a number or a truth value, found"),
        ('{"a": {"$contains": null}}', "text, a number or a truth value, found None"),
        ('{"a": {"$contains_any": "x"}}', r"a list of values under \$contains_any"),
        ('{"a": {"$contains_all": []}}', r"1 to 1024 values under \$contains_all, found 0"),
        ('{"a": {"$contains_all": [%s1]}}' % ("1," * 1_024), r"1 to 1024 values .*, found 1025"),
        ('{"a": {"$in": [null]}}', "text, a number or a truth value, found None"),
        ('{"a": {"$gt": "2024-13-01"}}', "a number, or a date such as .*, found '2024-13-01'"),
        ('{"a": {"$lte": true}}', "a number, found True"),
        ('{"a": {"$lte": null}}', "a number, found None"),
        ('{"a": {"$lte": [1]}}', "a number, found"),
        ('{"a": {}, "b": 1}', "a condition on each field, found"),
        ('{"a": {"$like": 1}}', r"\$eq, \$ne, .* or \$exists, found '\$like'"),
    ],
)
def test_filter_rejects_invalid_expression_with_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse(text)


def test_filter_rejects_number_with_too_many_digits() -> None:
    """Otherwise the filter would match another number."""
    assert parse('{"x": 1.2345678901234567}') == FieldIn("x", (1.2345678901234567,))
    assert parse('{"x": 12.50}') == FieldIn("x", (12.5,))
    with pytest.raises(InvalidRequest, match="0.1234567890123456789 has more digits than a float"):
        parse('{"x": 0.1234567890123456789}')
