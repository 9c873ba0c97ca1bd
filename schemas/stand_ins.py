"""Packages that another package imports at its top and that we never use, put off until they are.

While the other package is imported, modules that only promise their names stand in for them. What
is made of such a class, or read from such a module later, is of the real one, imported then. Only
for packages whose import costs a start more than this costs a reader, and of which nobody derives a
class, catches an error or asks `isinstance`: a promise is not the class itself. No other thread may
import them meanwhile.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Modules that are imported already stay as they are. Classes and functions only."""
    promised = [_StandIn(name) for name in names if name not in sys.modules]
    sys.modules.update({module.__name__: module for module in promised})
    try:
        yield
    finally:
        for module in promised:
            module.promises = False
            sys.modules.pop(module.__name__, None)


class _StandIn(ModuleType):
    """A module: promises every name until the real one may be imported."""

    promises = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        if self.promises:
            return _promised(self.__name__, name)
        return getattr(import_module(self.__name__), name)


def _promised(module: str, name: str) -> type:
    """A class whose call is a call of the real one."""

    def call(_: type, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return type(name, (), {"__new__": call})
