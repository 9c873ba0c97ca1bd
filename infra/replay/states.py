"""A router's state with other values in it: all that it holds passes by, and is replaced or kept.

Whatever is put in a value's place is written down in its stead, and what that holds passes by too.
Called by `redacting.py`.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

from streams.core.router import Router


def seen_in(router: Router) -> list[Any]:
    """Every object that a router holds but plain containers, numbers and texts."""
    found: list[Any] = []

    def see(value: Any) -> Any:
        found.append(value)
        return value

    _Writer(io.BytesIO(), see, lambda text: text).dump(router)
    return found


def restated(router: Router, other: Callable[[Any], Any], name: Callable[[str], str]) -> Router:
    """Another router, with other objects and names in place of those of this one."""
    state = io.BytesIO()
    _Writer(state, other, name).dump(router)
    found: Router = _Reader(io.BytesIO(state.getvalue())).load()
    return found


class _Writer(pickle.Pickler):
    def __init__(
        self, out: io.BytesIO, other: Callable[[Any], Any], name: Callable[[str], str]
    ) -> None:
        super().__init__(out, protocol=5)
        self._other, self._name = other, name

    def reducer_override(self, value: Any) -> Any:
        """How another object is written down; this one as ever where there is no other."""
        if isinstance(value, type) or callable(value):
            return NotImplemented
        other = self._other(value)
        return NotImplemented if other is value else other.__reduce_ex__(5)

    def persistent_id(self, value: Any) -> str | None:
        """The text in place of this one."""
        if type(value) is not str:
            return None
        name = self._name(value)
        return None if name is value else name


class _Reader(pickle.Unpickler):
    def persistent_load(self, name: str) -> str:
        """What was put in a text's place is that text."""
        return name
