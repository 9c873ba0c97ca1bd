"""Whether two routers are in the same state: equal in all that they hold, and in what of it is one.

Stricter than what decides: routers that are alike decide alike from there on, while of others
nothing is known. Two names for one list are not two equal lists, since a change would reach both;
of what nobody changes (numbers, texts, records of `schemas`) only the value counts. Orders count,
but for those of sets. Called by `pieces.py`.
"""

from collections.abc import Iterable
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np

from streams.core.router import Router

_VALUES = (int, str, bytes, bool, type(None), Enum, set, frozenset)
_RECORDS = ("schemas.records", "streams.config")  # nobody changes what is of these
_ABSENT = object()


def alike(one: Router, other: Router) -> bool:
    """Whether they are in the same state."""
    return _Comparing().same(one, other)


class _Comparing:
    """Goes through two states at once."""

    def __init__(self) -> None:
        # By what may be changed of either state, its counterpart. Held here, they keep their ids.
        self._there: dict[int, tuple[Any, Any]] = {}
        self._here: dict[int, tuple[Any, Any]] = {}

    def same(self, one: Any, other: Any) -> bool:
        """Whether these are."""
        kind = type(one)
        if kind is not type(other):
            return False
        if isinstance(one, _VALUES):
            return bool(one == other)
        if kind is float:
            return bool(one.hex() == other.hex())
        if kind is tuple:
            return self._all(one, other)
        if kind.__module__ not in _RECORDS:
            known = self._there.get(id(one)), self._here.get(id(other))
            if known != (None, None):
                return known[0] is not None and known[0][1] is other and known[0] is known[1]
            self._there[id(one)] = self._here[id(other)] = (one, other)
        return self._same_within(one, other)

    def _same_within(self, one: Any, other: Any) -> bool:
        if isinstance(one, np.ndarray):
            there = (other.dtype, other.shape, other.tobytes())
            return (one.dtype, one.shape, one.tobytes()) == there
        if type(one) is list:
            return self._all(one, other)
        if type(one) is dict:
            return self._all(one, other) and self._all(one.values(), other.values())
        # What makes it anew and with which state, as pickles have it: of any other kind of object.
        made, made_there = one.__reduce_ex__(4), other.__reduce_ex__(4)
        return all(map(self._same_part, made, made_there))

    def _same_part(self, one: Any, other: Any) -> bool:
        """Of what an object is made; dictionaries and iterators are made for this question."""
        if one is other or one is None or other is None:
            return one is other
        if type(one) is dict:
            return self._all(one, other) and self._all(one.values(), other.values())
        if type(one) is tuple:
            return len(one) == len(other) and all(map(self._same_part, one, other))
        if hasattr(one, "__next__"):
            return self._all(one, other)
        return self.same(one, other)

    def _all(self, one: Iterable[Any], other: Iterable[Any]) -> bool:
        pairs = zip_longest(one, other, fillvalue=_ABSENT)
        return all(self.same(here, there) for here, there in pairs)
