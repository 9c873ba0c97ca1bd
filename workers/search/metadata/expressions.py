"""Filters from their JSON expressions (`schemas/rules/filters.py` has the grammar)."""

import functools
import operator
from collections.abc import Callable

from schemas.rules import filters as said
from workers.search.metadata.filters import Dated, Equal, Exists, Filter, OneOf, Range


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Filter:
    """The filter of a JSON expression; raises InvalidRequest saying what was expected."""
    return _made(said.parse(text))


def _made(condition: said.Condition) -> Filter:
    match condition:
        case said.OneOf(field, (value,)):
            return Equal(field, value)
        case said.OneOf(field, values):
            return OneOf(field, values)
        case said.Between(field, low, high):
            return Range(field, low, high)
        case said.Dated(field, low, high):
            return Dated(field, low, high)
        case said.Exists(field):
            return Exists(field)
        case said.Not(inner):
            return ~_made(inner)
        case said.All(parts, is_any):
            return _joined(operator.or_ if is_any else operator.and_, [*map(_made, parts)])


def _joined(join: Callable[[Filter, Filter], Filter], parts: list[Filter]) -> Filter:
    """A tree of them all, as flat as can be: whoever walks it recurses."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(_joined(join, parts[:middle]), _joined(join, parts[middle:]))
