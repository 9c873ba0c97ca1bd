"""Filters over metadata, which select the rows that a search may return.

For example `EqualFilter("language", "it") & ~OneOfFilter("source", ["a", "b"])`. Filters are
values: equal ones are the same filter, so that a view compiles each only once. A compiled filter is
a bit set, and the list of its rows if a search scans them (`plans.py`).
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schemas.rules.filters import (
    All,
    Condition,
    DateRange,
    FieldExists,
    FieldIn,
    Not,
    NumberRange,
    Value,
)
from schemas.rules.filters import parse as parse_condition
from workers.vector.filters.columns import ColumnStore
from workers.vector.kernels.arrays import (
    WORD_BITS,
    Array,
    first_bits,
    members,
    pack_bits,
    unpack_bits,
)

COMPILED_MAX = 64  # compiled filters in a cache
_FEW = 256  # rows per allowed row above which it is faster to skip empty words
_NO_BITS: Array = np.empty(0, np.uint32)


class Filter:
    """A condition on the metadata of a row."""

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        """Return for which of rows `first` to `last` it holds, bool; raises UnknownFilterField."""
        raise NotImplementedError

    @property
    def values_count(self) -> int:
        """Return the number of values that each row is compared with."""
        return 1

    def __and__(self, right: "Filter") -> "Filter":
        return CombinedFilter(operator.and_, self, right)

    def __or__(self, right: "Filter") -> "Filter":
        return CombinedFilter(operator.or_, self, right)

    def __invert__(self) -> "Filter":
        return NotFilter(self)


@dataclass(frozen=True, slots=True)
class EqualFilter(Filter):
    """A field has the given value."""

    field: str
    value: Value

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        return columns.equal(self.field, [self.value], first, last)


@dataclass(frozen=True, slots=True, init=False)
class OneOfFilter(Filter):
    """A field has one of several values."""

    field: str
    values: tuple[Value, ...]

    def __init__(self, field: str, values: Any) -> None:
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "values", tuple(values))

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        return columns.equal(self.field, self.values, first, last)

    @property
    def values_count(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class RangeFilter(Filter):
    """A number is in [low, high]; None leaves a side open."""

    field: str
    low: float | None = None
    high: float | None = None

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        return columns.between(self.field, self.low, self.high, first, last)


@dataclass(frozen=True, slots=True)
class DateRangeFilter(Filter):
    """A date is in [low, high], in microseconds since 1970; None leaves a side open."""

    field: str
    low: int | None = None
    high: int | None = None

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        return columns.dated(self.field, self.low, self.high, first, last)


@dataclass(frozen=True, slots=True)
class ExistsFilter(Filter):
    """A field has any value; if no row has the field, it holds for no row."""

    field: str

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        return columns.present(self.field, first, last)


@dataclass(frozen=True, slots=True)
class CombinedFilter(Filter):
    """Both filters hold, or one of them; `join` is `operator.and_` or `operator.or_`."""

    join: Callable[[Any, Any], Any]
    lhs: Filter
    rhs: Filter

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        lhs, rhs = self.lhs.mask(columns, first, last), self.rhs.mask(columns, first, last)
        mask: Array = self.join(lhs, rhs)
        return mask

    @property
    def values_count(self) -> int:
        return self.lhs.values_count + self.rhs.values_count


@dataclass(frozen=True, slots=True)
class NotFilter(Filter):
    """The inner filter does not hold."""

    inner: Filter

    def mask(self, columns: ColumnStore, first: int, last: int) -> Array:
        return ~self.inner.mask(columns, first, last)

    @property
    def values_count(self) -> int:
        return self.inner.values_count


@dataclass(frozen=True, eq=False)
class AllowedRows:
    """A filter compiled for a view: the live rows that it allows."""

    bits: Array  # uint32, one bit a row
    count: int
    total: int  # rows of the view

    @cached_property
    def rows(self) -> Array:
        """Return the allowed rows, ascending, int64."""
        if self.count * _FEW > self.total:
            return np.flatnonzero(unpack_bits(self.bits, self.total))
        return members(self.bits)


class CompiledFilters:
    """A cache of filters over columns, as bit sets of rows, deleted ones too.

    Rows are only appended and never change, so a cached filter is compared with new rows only. Any
    thread may call it.
    """

    def __init__(self, columns: ColumnStore) -> None:
        self._columns = columns
        self._bit_sets: dict[str, tuple[Array, int]] = {}  # bit sets, and their numbers of rows

    def comparisons(self, where: Filter, count: int) -> int:
        """Return the number of comparisons that `allowed` would make."""
        known_rows = self._bit_sets.get(repr(where), (None, 0))[1]
        rows = max(0, count - known_rows)
        return where.values_count * (rows + rows * self._columns.extra_count // max(1, count))

    def allowed(self, where: Filter, alive: Array | None, count: int) -> AllowedRows:
        """Compile `where` for the first `count` rows; raises UnknownFilterField.

        `alive` is a bit set of at least as many rows, or None if all rows are live.
        """
        key = repr(where)  # not `where`: 1 and True are equal, but different filters
        bits, known_rows = self._bit_sets.get(key, (_NO_BITS, 0))
        if known_rows < count:
            whole = known_rows // WORD_BITS  # complete words, which do not change
            new = pack_bits(where.mask(self._columns, whole * WORD_BITS, count))
            bits = np.concatenate([bits[:whole], new])
            while len(self._bit_sets) >= COMPILED_MAX:
                self._bit_sets.pop(next(iter(self._bit_sets)), None)
            self._bit_sets[key] = bits, count
        elif known_rows > count:
            bits = first_bits(bits, count)
        if alive is not None:
            bits = bits & alive[: len(bits)]
        return AllowedRows(bits, int(np.bitwise_count(bits).sum()), count)


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Filter:
    """Parse a JSON expression to a filter; raises InvalidRequest with the expected form."""
    return _filter_of(parse_condition(text))


def _filter_of(condition: Condition) -> Filter:
    match condition:
        case FieldIn(field, (value,)):
            return EqualFilter(field, value)
        case FieldIn(field, values):
            return OneOfFilter(field, values)
        case NumberRange(field, low, high):
            return RangeFilter(field, low, high)
        case DateRange(field, low, high):
            return DateRangeFilter(field, low, high)
        case FieldExists(field):
            return ExistsFilter(field)
        case Not(inner):
            return ~_filter_of(inner)
        case All(parts, is_any):
            return _join(operator.or_ if is_any else operator.and_, [*map(_filter_of, parts)])


def _join(join: Callable[[Filter, Filter], Filter], parts: list[Filter]) -> Filter:
    """Join filters in a balanced tree, because its evaluation recurses."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(_join(join, parts[:middle]), _join(join, parts[middle:]))
