"""Filters over columns: what holds for rows with, without and with another kind of value."""

import numpy as np
import pytest

from schemas.errors import InvalidRequest, UnknownFilterField
from workers.search.index.columns import COLUMNS_MAX, Columns, Value
from workers.search.index.filters import Equal, Filter, OneOf, Range, compiled
from workers.search.kernels.arrays import packed

ROWS: list[dict[str, Value]] = [
    {"year": 1999, "language": "it", "open": True},
    {"year": 2020.5, "language": "en"},
    {"language": "it", "open": False},
    {},
]


def columns() -> Columns:
    made = Columns()
    made.check(ROWS)
    made.append(0, ROWS, 8)
    return made


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        (Equal("language", "it"), [0, 2]),
        (Equal("open", True), [0]),
        (Equal("year", 1999.0), [0]),
        (OneOf("language", ["en", "it", "fr"]), [0, 1, 2]),
        (OneOf("language", []), []),
        (Range("year"), [0, 1]),
        (Range("year", low=2000), [1]),
        (Range("year", high=1999), [0]),
        (~Range("year"), [2, 3]),
        (Equal("language", "it") & Equal("open", False), [2]),
        (Equal("language", "en") | Equal("open", True), [0, 1]),
    ],
)
def test_a_filter_holds_for_these_rows(where: Filter, rows: list[int]) -> None:
    assert np.flatnonzero(where.mask(columns(), 4)).tolist() == rows
    dead = packed(np.array([False, True, True, True]))
    allowed = compiled(where, columns(), dead, 4)
    assert allowed.rows.tolist() == [row for row in rows if row > 0]
    assert allowed.count == len(allowed.rows)


@pytest.mark.parametrize(
    "where",
    [Equal("colour", "red"), Equal("year", "1999"), Equal("language", 1), Equal("year", True),
     Range("language", low=1), Equal("language", "it") & Equal("colour", "red")],
)  # fmt: skip
def test_a_field_that_cannot_be_meant_is_named(where: Filter) -> None:
    with pytest.raises(UnknownFilterField, match="field"):
        where.mask(columns(), 4)


def test_filters_are_values_and_know_how_much_they_compare() -> None:
    one = Equal("language", "it") & (Range("year", low=1) | ~OneOf("open", [True, False]))
    same = Equal("language", "it") & (Range("year", low=1) | ~OneOf("open", [True, False]))
    other = Equal("language", "it") | (Range("year", low=1) | ~OneOf("open", [True, False]))
    assert one == same and repr(one) == repr(same) and repr(one) != repr(other)
    assert one.values_count == 4


def test_rows_that_were_taken_keep_their_values_and_their_order() -> None:
    taken = columns().taken(np.array([2, 0, 3]))
    assert np.flatnonzero(Equal("language", "it").mask(taken, 3)).tolist() == [0, 1]
    assert np.flatnonzero(Range("year").mask(taken, 3)).tolist() == [1]


@pytest.mark.parametrize(
    "row",
    [{"year": "1999"}, {"language": 5}, {"year": 2**53 + 2}, {"year": float("nan")},
     {f"f{i}": i for i in range(COLUMNS_MAX)}],
)  # fmt: skip
def test_metadata_that_no_column_can_hold_is_refused(row: dict[str, Value]) -> None:
    with pytest.raises(InvalidRequest, match="field"):
        columns().check([row])
