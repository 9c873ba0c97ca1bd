"""Filters over metadata: which rows a search may return.

`Equal("language", "it") & Range("year", low=2020) & ~OneOf("source", ["a", "b"])`. Filters are
values: equal ones are the same filter, so that a view compiles each once. A compiled filter is
a bit set, and the list of its rows where a search scans them (`ways.py`).
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from workers.search.index.columns import Columns, Value
from workers.search.kernels.arrays import Array, packed, unpacked


class Filter:
    """A condition on the metadata of a row."""

    def mask(self, columns: Columns, count: int) -> Array:
        """Which of the first `count` rows it holds for; raises UnknownFilterField."""
        raise NotImplementedError

    @property
    def values_count(self) -> int:
        """Values that each row is compared with."""
        return 1

    def __and__(self, other: "Filter") -> "Filter":
        return Joined(operator.and_, self, other)

    def __or__(self, other: "Filter") -> "Filter":
        return Joined(operator.or_, self, other)

    def __invert__(self) -> "Filter":
        return Other(self)


@dataclass(frozen=True, slots=True)
class Equal(Filter):
    """A field has a value."""

    field: str
    value: Value

    def mask(self, columns: Columns, count: int) -> Array:
        return columns.equal(self.field, [self.value], count)


@dataclass(frozen=True, slots=True, init=False)
class OneOf(Filter):
    """A field has one of several values."""

    field: str
    values: tuple[Value, ...]

    def __init__(self, field: str, values: Any) -> None:
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "values", tuple(values))

    def mask(self, columns: Columns, count: int) -> Array:
        return columns.equal(self.field, self.values, count)

    @property
    def values_count(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Range(Filter):
    """A number is in [low, high]; None leaves a side open."""

    field: str
    low: float | None = None
    high: float | None = None

    def mask(self, columns: Columns, count: int) -> Array:
        return columns.between(self.field, self.low, self.high, count)


@dataclass(frozen=True, slots=True)
class Unset(Filter):
    """A field of labels has no value, if there is such a field."""

    field: str

    def mask(self, columns: Columns, count: int) -> Array:
        return columns.unset(self.field, count)


@dataclass(frozen=True, slots=True)
class Joined(Filter):
    """Two filters hold, or one of them, as `join` says: `operator.and_` or `operator.or_`."""

    join: Callable[[Any, Any], Any]
    one: Filter
    two: Filter

    def mask(self, columns: Columns, count: int) -> Array:
        found: Array = self.join(self.one.mask(columns, count), self.two.mask(columns, count))
        return found

    @property
    def values_count(self) -> int:
        return self.one.values_count + self.two.values_count


@dataclass(frozen=True, slots=True)
class Other(Filter):
    """A filter does not hold."""

    inner: Filter

    def mask(self, columns: Columns, count: int) -> Array:
        return ~self.inner.mask(columns, count)

    @property
    def values_count(self) -> int:
        return self.inner.values_count


@dataclass(frozen=True, eq=False)
class Allowed:
    """A filter compiled for a view: the live rows that it allows."""

    bits: Array  # uint32, one bit a row
    count: int
    total: int  # rows of the view

    @cached_property
    def rows(self) -> Array:
        """The allowed rows, ascending, int64."""
        return np.flatnonzero(unpacked(self.bits, self.total))


def compiled(where: Filter, columns: Columns, alive: Array | None, count: int) -> Allowed:
    """`where` for the first `count` rows; `alive` is a bit set, or None where all rows live."""
    mask = where.mask(columns, count)
    if alive is not None:
        mask = mask & unpacked(alive, count)
    return Allowed(packed(mask), int(np.count_nonzero(mask)), count)
