"""Copies a router's state with other values in it, for `redacting.py`.

The copy is made by pickling: every object of the state is offered to a function that returns it or
a substitute. Objects within a substitute are offered too.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

from streams.core.router import Router


def objects_in(router: Router) -> list[Any]:
    """Return every object of a router's state except plain containers, numbers and texts."""
    objects: list[Any] = []

    def see(value: Any) -> Any:
        objects.append(value)
        return value

    _StatePickler(io.BytesIO(), see, lambda text: text).dump(router)
    return objects


def restate(router: Router, substitute: Callable[[Any], Any], name: Callable[[str], str]) -> Router:
    """Return a copy of the router with substitutes for its objects and names."""
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
        """Return how to pickle the substitute, or NotImplemented where there is none."""
        if isinstance(value, type) or callable(value):
            return NotImplemented
        stand_in = self._substitute(value)
        return NotImplemented if stand_in is value else stand_in.__reduce_ex__(5)

    def persistent_id(self, value: Any) -> str | None:
        """Return the substitute of a text, or None to keep the text."""
        if type(value) is not str:
            return None
        name = self._name(value)
        return None if name is value else name


class _StateUnpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> str:
        """Return the text itself, which was pickled as its own id."""
        return name
