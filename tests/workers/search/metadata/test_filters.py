"""Filters over columns: what holds for rows with, without and with another kind of value."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from schemas.errors import InvalidRequest, UnknownFilterField
from schemas.rules.metadata import FIELDS_MAX, Metadata
from workers.search.kernels.arrays import pack_bits, unpack_bits
from workers.search.metadata.columns import ColumnStore
from workers.search.metadata.filters import (
    CompiledFilters,
    DateRangeFilter,
    EqualFilter,
    ExistsFilter,
    Filter,
    OneOfFilter,
    RangeFilter,
)

ROWS: list[Metadata] = [
    {"year": 1999, "language": "it", "open": True},
    {"year": 2020.5, "language": "en"},
    {"language": "it", "open": False},
    {},
]


def columns() -> ColumnStore:
    made = ColumnStore()
    made.check(ROWS)
    made.append(0, ROWS, 8)
    return made


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        (EqualFilter("language", "it"), [0, 2]),
        (EqualFilter("open", True), [0]),
        (EqualFilter("year", 1999.0), [0]),
        (OneOfFilter("language", ["en", "it", "fr"]), [0, 1, 2]),
        (OneOfFilter("language", []), []),
        (RangeFilter("year"), [0, 1]),
        (RangeFilter("year", low=2000), [1]),
        (RangeFilter("year", high=1999), [0]),
        (~RangeFilter("year"), [2, 3]),
        (EqualFilter("language", "it") & EqualFilter("open", False), [2]),
        (EqualFilter("language", "en") | EqualFilter("open", True), [0, 1]),
    ],
)
def test_a_filter_holds_for_these_rows(where: Filter, rows: list[int]) -> None:
    assert np.flatnonzero(where.mask(columns(), 0, 4)).tolist() == rows
    dead = pack_bits(np.array([False, True, True, True]))
    allowed = CompiledFilters(columns()).allowed(where, dead, 4)
    assert allowed.rows.tolist() == [row for row in rows if row > 0]
    assert allowed.count == len(allowed.rows)


@pytest.mark.parametrize(
    "where",
    [EqualFilter("colour", "red"), EqualFilter("year", "1999"), EqualFilter("language", 1),
     EqualFilter("year", True),
     RangeFilter("language", low=1), EqualFilter("language", "it") & EqualFilter("colour", "red")],
)  # fmt: skip
def test_a_field_that_cannot_be_meant_is_named(where: Filter) -> None:
    with pytest.raises(UnknownFilterField, match="field"):
        where.mask(columns(), 0, 4)


def test_filters_are_values_and_know_how_much_they_compare() -> None:
    one = EqualFilter("language", "it") & (
        RangeFilter("year", low=1) | ~OneOfFilter("open", [True, False])
    )
    same = EqualFilter("language", "it") & (
        RangeFilter("year", low=1) | ~OneOfFilter("open", [True, False])
    )
    other = EqualFilter("language", "it") | (
        RangeFilter("year", low=1) | ~OneOfFilter("open", [True, False])
    )
    assert one == same and repr(one) == repr(same) and repr(one) != repr(other)
    assert one.values_count == 4


def test_rows_that_were_taken_keep_their_values_and_their_order() -> None:
    taken = columns().take(np.array([2, 0, 3]))
    assert np.flatnonzero(EqualFilter("language", "it").mask(taken, 0, 3)).tolist() == [0, 1]
    assert np.flatnonzero(RangeFilter("year").mask(taken, 0, 3)).tolist() == [1]


def test_labels_and_fields_that_no_row_has_any_more_are_forgotten() -> None:
    """Documents that are replaced bring new ones all the time."""
    taken = columns().take(np.array([1, 3]))
    assert taken.labels == {"language": {"en": 0}}
    assert set(taken.label_codes) == {"language"} and set(taken.numbers) == {"year"}
    taken.append(2, [{"language": "it"}, {"language": "en"}], 4)
    assert np.flatnonzero(EqualFilter("language", "en").mask(taken, 0, 4)).tolist() == [0, 3]
    assert np.flatnonzero(EqualFilter("language", "it").mask(taken, 0, 4)).tolist() == [2]


def test_lists_keep_all_of_their_values_where_rows_are_taken_and_labels_forgotten() -> None:
    held = ColumnStore()
    rows: list[Metadata] = [
        {"tag": "gone"}, {"tag": ["a", "2024-05-31", "b"], "n": [1, 9]}, {}, {"tag": ["b", "c"]},
    ]  # fmt: skip
    held.check(rows)
    held.append(0, rows, 4)
    taken = held.take(np.array([3, 1]))
    assert set(taken.labels["tag"]) == {"a", "2024-05-31", "b", "c"}
    for where, expected in (
        (EqualFilter("tag", "c"), [0]),
        (EqualFilter("tag", "b"), [0, 1]),
        (OneOfFilter("tag", ["a", "gone"]), [1]),
        (DateRangeFilter("tag", low=0), [1]),
        (RangeFilter("n", low=5), [1]),
        (~ExistsFilter("n"), [0]),
    ):
        assert np.flatnonzero(where.mask(taken, 0, 2)).tolist() == expected, where
    assert taken.take(np.array([0])).extras["tag"].arrays[0].tolist() == [0]
    assert "n" not in taken.take(np.array([0])).numbers


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"n": [1, "a"]}, "a number in field 'n', as others have it, found 'a'"),
        ({"tag": [["a"]]}, "a list of these in field 'tag', found a list"),
        ({"tag": ["a", None]}, "a list of these in field 'tag', found null"),
        ({"tag": ["a"] * 1_025}, "at most 1024 values in field 'tag', found 1025"),
    ],
)
def test_lists_that_no_column_can_hold_are_refused(row: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ColumnStore().check([row])


def test_a_range_of_the_other_kind_is_refused_and_existence_never() -> None:
    held = columns()
    with pytest.raises(UnknownFilterField, match="holds numbers; the range is of dates"):
        DateRangeFilter("year", low=0).mask(held, 0, 4)
    with pytest.raises(UnknownFilterField, match="a range needs numbers, or dates as its bounds"):
        RangeFilter("language", low=0).mask(held, 0, 4)
    with pytest.raises(UnknownFilterField, match="no row has a field 'colour'"):
        DateRangeFilter("colour", low=0).mask(held, 0, 4)
    assert not DateRangeFilter("language", low=0).mask(held, 0, 4).any()
    assert not ExistsFilter("colour").mask(held, 0, 4).any()


@dataclass(frozen=True)
class Seen(EqualFilter):
    """A filter that tells which rows it was compared with."""

    spans: list[tuple[int, int]] = field(default_factory=list, compare=False, repr=False)

    def mask(self, columns: ColumnStore, first: int, last: int) -> Any:
        self.spans.append((first, last))
        return columns.equal(self.field, [self.value], first, last)


def test_only_rows_that_are_new_are_compared_with_a_filter_that_is_known() -> None:
    """Whatever was deleted since, and for views of earlier moments."""
    held = ColumnStore()
    rows: list[Metadata] = [{"n": row % 3} for row in range(200)]
    held.append(0, rows, 200)
    filters, where = CompiledFilters(held), Seen("n", 1)
    right = np.arange(200) % 3 == 1
    alive = np.arange(224) % 5 > 0
    for count, given in (
        (70, None), (70, alive), (200, None), (200, alive), (33, alive), (64, None)
    ):  # fmt: skip
        expected = right[:count] if given is None else right[:count] & alive[:count]
        allowed = filters.allowed(where, None if given is None else pack_bits(given), count)
        assert unpack_bits(allowed.bits, count).tolist() == expected.tolist()
        assert allowed.rows.tolist() == np.flatnonzero(expected).tolist()
        assert (allowed.count, len(allowed.bits)) == (len(allowed.rows), -(-count // 32))
    assert where.spans == [(0, 70), (64, 200)]
    assert filters.comparisons(where, 200) == 0 and filters.comparisons(where, 230) == 30


def test_further_values_of_lists_count_among_comparisons() -> None:
    """Where they are many, a filter is compiled beside the loop, too."""
    held = ColumnStore()
    held.append(0, [{"tag": ["a"] * 9, "year": [1, 2]}] * 100, 100)
    filters = CompiledFilters(held)
    assert filters.comparisons(EqualFilter("tag", "a"), 100) == 900


@pytest.mark.parametrize(
    "row",
    [{"year": "1999"}, {"language": 5}, {"year": 2**53 + 2}, {"year": float("nan")},
     {f"f{i}": i for i in range(FIELDS_MAX)}],
)  # fmt: skip
def test_metadata_that_no_column_can_hold_is_refused(row: Metadata) -> None:
    with pytest.raises(InvalidRequest, match="field"):
        columns().check([row])
