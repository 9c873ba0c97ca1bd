"""Parses filters from JSON expressions (`schemas/rules/filters.py` has the grammar)."""

import functools
import operator
from collections.abc import Callable

from schemas.rules.filters import (
    All,
    Condition,
    DateRange,
    FieldExists,
    FieldIn,
    Not,
    NumberRange,
)
from schemas.rules.filters import parse as parse_condition
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
