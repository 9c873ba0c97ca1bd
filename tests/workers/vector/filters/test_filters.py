"""Filters over columns: what holds for rows with, without and with another kind of value."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from schemas.errors import InvalidRequest, UnknownFilterField
from schemas.rules.metadata import FIELDS_MAX, Metadata
from workers.vector.filters.columns import ColumnStore
from workers.vector.filters.filters import (
    CompiledFilters,
    DateRangeFilter,
    EqualFilter,
    ExistsFilter,
    Filter,
    OneOfFilter,
    RangeFilter,
)
from workers.vector.kernels.arrays import pack_bits, unpack_bits

ROWS: list[Metadata] = [
    {"year": 1999, "language": "it", "open": True},
    {"year": 2020.5, "language": "en"},
    {"language": "it", "open": False},
    {},
]


def columns() -> ColumnStore:
    store = ColumnStore()
    store.check(ROWS)
    store.append(0, ROWS, 8)
    return store


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
def test_filter_matches_expected_rows(where: Filter, rows: list[int]) -> None:
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
def test_filter_error_names_unknown_field(where: Filter) -> None:
    with pytest.raises(UnknownFilterField, match="field"):
        where.mask(columns(), 0, 4)


def test_filters_compare_by_value_and_count_values() -> None:
    conjunction = EqualFilter("language", "it") & (
        RangeFilter("year", low=1) | ~OneOfFilter("open", [True, False])
    )
    equal_conjunction = EqualFilter("language", "it") & (
        RangeFilter("year", low=1) | ~OneOfFilter("open", [True, False])
    )
    disjunction = EqualFilter("language", "it") | (
        RangeFilter("year", low=1) | ~OneOfFilter("open", [True, False])
    )
    assert (
        conjunction == equal_conjunction
        and repr(conjunction) == repr(equal_conjunction)
        and repr(conjunction) != repr(disjunction)
    )
    assert conjunction.values_count == 4


def test_column_take_keeps_values_and_order() -> None:
    subset = columns().take(np.array([2, 0, 3]))
    assert np.flatnonzero(EqualFilter("language", "it").mask(subset, 0, 3)).tolist() == [0, 1]
    assert np.flatnonzero(RangeFilter("year").mask(subset, 0, 3)).tolist() == [1]


def test_column_take_drops_unused_labels_and_fields() -> None:
    """Documents that replace others bring new labels all the time."""
    subset = columns().take(np.array([1, 3]))
    assert subset.labels == {"language": {"en": 0}}
    assert set(subset.label_codes) == {"language"} and set(subset.numbers) == {"year"}
    subset.append(2, [{"language": "it"}, {"language": "en"}], 4)
    assert np.flatnonzero(EqualFilter("language", "en").mask(subset, 0, 4)).tolist() == [0, 3]
    assert np.flatnonzero(EqualFilter("language", "it").mask(subset, 0, 4)).tolist() == [2]


def test_column_take_keeps_all_list_values() -> None:
    store = ColumnStore()
    rows: list[Metadata] = [
        {"tag": "gone"}, {"tag": ["a", "2024-05-31", "b"], "n": [1, 9]}, {}, {"tag": ["b", "c"]},
    ]  # fmt: skip
    store.check(rows)
    store.append(0, rows, 4)
    subset = store.take(np.array([3, 1]))
    assert set(subset.labels["tag"]) == {"a", "2024-05-31", "b", "c"}
    for where, expected in (
        (EqualFilter("tag", "c"), [0]),
        (EqualFilter("tag", "b"), [0, 1]),
        (OneOfFilter("tag", ["a", "gone"]), [1]),
        (DateRangeFilter("tag", low=0), [1]),
        (RangeFilter("n", low=5), [1]),
        (~ExistsFilter("n"), [0]),
    ):
        assert np.flatnonzero(where.mask(subset, 0, 2)).tolist() == expected, where
    assert subset.take(np.array([0])).extras["tag"].arrays[0].tolist() == [0]
    assert "n" not in subset.take(np.array([0])).numbers


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"n": [1, "a"]}, "a number in field 'n', as others have it, found 'a'"),
        ({"tag": [["a"]]}, "a list of these in field 'tag', found a list"),
        ({"tag": ["a", None]}, "a list of these in field 'tag', found null"),
        ({"tag": ["a"] * 1_025}, "at most 1024 values in field 'tag', found 1025"),
    ],
)
def test_columns_reject_unstorable_lists(row: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ColumnStore().check([row])


def test_range_filter_rejects_field_of_other_type() -> None:
    store = columns()
    with pytest.raises(UnknownFilterField, match="holds numbers; the range is of dates"):
        DateRangeFilter("year", low=0).mask(store, 0, 4)
    with pytest.raises(UnknownFilterField, match="a range needs numbers, or dates as its bounds"):
        RangeFilter("language", low=0).mask(store, 0, 4)
    with pytest.raises(UnknownFilterField, match="no row has a field 'colour'"):
        DateRangeFilter("colour", low=0).mask(store, 0, 4)
    assert not DateRangeFilter("language", low=0).mask(store, 0, 4).any()
    assert not ExistsFilter("colour").mask(store, 0, 4).any()


@dataclass(frozen=True)
class RecordingFilter(EqualFilter):
    """A filter that tells which rows it was compared with."""

    spans: list[tuple[int, int]] = field(default_factory=list, compare=False, repr=False)

    def mask(self, columns: ColumnStore, first: int, last: int) -> Any:
        self.spans.append((first, last))
        return columns.equal(self.field, [self.value], first, last)


def test_compiled_filter_compares_only_new_rows() -> None:
    """Rows are deleted meanwhile, and views of earlier moments ask again."""
    store = ColumnStore()
    rows: list[Metadata] = [{"n": row % 3} for row in range(200)]
    store.append(0, rows, 200)
    filters, where = CompiledFilters(store), RecordingFilter("n", 1)
    right = np.arange(200) % 3 == 1
    alive = np.arange(224) % 5 > 0
    for count, view_alive in (
        (70, None), (70, alive), (200, None), (200, alive), (33, alive), (64, None)
    ):  # fmt: skip
        expected = right[:count] if view_alive is None else right[:count] & alive[:count]
        allowed = filters.allowed(
            where, None if view_alive is None else pack_bits(view_alive), count
        )
        assert unpack_bits(allowed.bits, count).tolist() == expected.tolist()
        assert allowed.rows.tolist() == np.flatnonzero(expected).tolist()
        assert (allowed.count, len(allowed.bits)) == (len(allowed.rows), -(-count // 32))
    assert where.spans == [(0, 70), (64, 200)]
    assert filters.comparisons(where, 200) == 0 and filters.comparisons(where, 230) == 30


def test_list_values_count_as_comparisons() -> None:
    """A filter with many comparisons is compiled beside the event loop."""
    store = ColumnStore()
    store.append(0, [{"tag": ["a"] * 9, "year": [1, 2]}] * 100, 100)
    filters = CompiledFilters(store)
    assert filters.comparisons(EqualFilter("tag", "a"), 100) == 900


@pytest.mark.parametrize(
    "row",
    [{"year": "1999"}, {"language": 5}, {"year": 2**53 + 2}, {"year": float("nan")},
     {f"f{i}": i for i in range(FIELDS_MAX)}],
)  # fmt: skip
def test_columns_reject_unstorable_metadata(row: Metadata) -> None:
    with pytest.raises(InvalidRequest, match="field"):
        columns().check([row])
