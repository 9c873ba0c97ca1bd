"""Parses filters from JSON expressions (`schemas/rules/filters.py` has the grammar)."""

import functools
import operator
from collections.abc import Callable

from schemas.rules import filters as said
from workers.vector.filters.filters import (
    DateRangeFilter,
    EqualFilter,
    ExistsFilter,
    Filter,
    OneOfFilter,
    RangeFilter,
)


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Filter:
    """Parse a JSON expression to a filter; raises InvalidRequest with the expected form."""
    return _filter_of(said.parse(text))


def _filter_of(condition: said.Condition) -> Filter:
    match condition:
        case said.FieldIn(field, (value,)):
            return EqualFilter(field, value)
        case said.FieldIn(field, values):
            return OneOfFilter(field, values)
        case said.NumberRange(field, low, high):
            return RangeFilter(field, low, high)
        case said.DateRange(field, low, high):
            return DateRangeFilter(field, low, high)
        case said.FieldExists(field):
            return ExistsFilter(field)
        case said.Not(inner):
            return ~_filter_of(inner)
        case said.All(parts, is_any):
            return _join(operator.or_ if is_any else operator.and_, [*map(_filter_of, parts)])


def _join(join: Callable[[Filter, Filter], Filter], parts: list[Filter]) -> Filter:
    """Join filters in a balanced tree, because its evaluation recurses."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(_join(join, parts[:middle]), _join(join, parts[middle:]))
