"""Compares the states of two routers: all values, and which references point to one object.

The comparison is stricter than decisions need. Routers with equal states decide the same from then
on; about others nothing is known. Two references to one list differ from two equal lists, since a
change would reach both. Of immutable values (numbers, texts, records of `schemas`) only the value
counts. Order counts, except in sets. Called by `pieces.py`.
"""

from collections.abc import Iterable
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np

from streams.core.router import Router

_VALUES = (int, str, bytes, bool, type(None), Enum, set, frozenset)
_RECORDS = ("schemas.records", "streams.config")  # never changed once made
_ABSENT = object()


def same_state(first: Router, second: Router) -> bool:
    """Return whether two routers are in the same state."""
    return _StateComparison().is_equal(first, second)


class _StateComparison:
    """Compares two states in one walk."""

    def __init__(self) -> None:
        # The counterpart of every mutable object of either state. References keep the ids valid.
        self._there: dict[int, tuple[Any, Any]] = {}
        self._here: dict[int, tuple[Any, Any]] = {}

    def is_equal(self, first: Any, second: Any) -> bool:
        """Return whether two parts of the states are equal."""
        kind = type(first)
        if kind is not type(second):
            return False
        if isinstance(first, _VALUES):
            return bool(first == second)
        if kind is float:
            return bool(first.hex() == second.hex())
        if kind is tuple:
            return self._all_equal(first, second)
        if kind.__module__ not in _RECORDS:
            pairs = self._there.get(id(first)), self._here.get(id(second))
            if pairs != (None, None):
                return pairs[0] is not None and pairs[0][1] is second and pairs[0] is pairs[1]
            self._there[id(first)] = self._here[id(second)] = (first, second)
        return self._has_equal_parts(first, second)

    def _has_equal_parts(self, first: Any, second: Any) -> bool:
        if isinstance(first, np.ndarray):
            there = (second.dtype, second.shape, second.tobytes())
            return (first.dtype, first.shape, first.tobytes()) == there
        if type(first) is list:
            return self._all_equal(first, second)
        if type(first) is dict:
            return self._all_equal(first, second) and self._all_equal(
                first.values(), second.values()
            )
        # Any other object: compare its class and state as pickle has them.
        first_parts, second_parts = first.__reduce_ex__(4), second.__reduce_ex__(4)
        return all(map(self._is_equal_part, first_parts, second_parts))

    def _is_equal_part(self, first: Any, second: Any) -> bool:
        """Return whether two parts of pickled objects are equal, new dictionaries by content."""
        if first is second or first is None or second is None:
            return first is second
        if type(first) is dict:
            return self._all_equal(first, second) and self._all_equal(
                first.values(), second.values()
            )
        if type(first) is tuple:
            return len(first) == len(second) and all(map(self._is_equal_part, first, second))
        if hasattr(first, "__next__"):
            return self._all_equal(first, second)
        return self.is_equal(first, second)

    def _all_equal(self, first: Iterable[Any], second: Iterable[Any]) -> bool:
        pairs = zip_longest(first, second, fillvalue=_ABSENT)
        return all(self.is_equal(here, there) for here, there in pairs)
