"""A router's state with other values in it: all that it holds passes by, and is replaced or kept.

Whatever is put in a value's place is written down in its stead, and what that holds passes by too.
Called by `redacting.py`.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

from streams.core.router import Router


def objects_in(router: Router) -> list[Any]:
    """Every object that a router holds but plain containers, numbers and texts."""
    objects: list[Any] = []

    def see(value: Any) -> Any:
        objects.append(value)
        return value

    _StatePickler(io.BytesIO(), see, lambda text: text).dump(router)
    return objects


def restate(router: Router, substitute: Callable[[Any], Any], name: Callable[[str], str]) -> Router:
    """Another router, with other objects and names in place of those of this one."""
    state = io.BytesIO()
    _StatePickler(state, substitute, name).dump(router)
    twin: Router = _StateUnpickler(io.BytesIO(state.getvalue())).load()
    return twin


class _StatePickler(pickle.Pickler):
    def __init__(
        self, out: io.BytesIO, substitute: Callable[[Any], Any], name: Callable[[str], str]
    ) -> None:
        super().__init__(out, protocol=5)
        self._substitute, self._name = substitute, name

    def reducer_override(self, value: Any) -> Any:
        """How another object is written down; this one as ever where there is no other."""
        if isinstance(value, type) or callable(value):
            return NotImplemented
        stand_in = self._substitute(value)
        return NotImplemented if stand_in is value else stand_in.__reduce_ex__(5)

    def persistent_id(self, value: Any) -> str | None:
        """The text in place of this one."""
        if type(value) is not str:
            return None
        name = self._name(value)
        return None if name is value else name


class _StateUnpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> str:
        """What was put in a text's place is that text."""
        return name
