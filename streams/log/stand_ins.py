"""Delays the import of packages that another package imports at its top and that we rarely use.

While the other package is imported, stand-in modules promise the names of these packages. A later
call of a promised class, or access to such a module, imports the real one. Only for packages whose
import costs more time at a start than this module costs its readers. The other package must not
derive a class of theirs, catch their errors or call `isinstance`, because a promise is not the
class itself. No other thread may import them in the meantime.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Replace modules within the context, unless they are imported already. Only for modules whose
    classes and functions are used, no other values."""
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
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        if self.promises:
            return _promised(self.__name__, name)
        return getattr(import_module(self.__name__), name)


def _promised(module: str, name: str) -> type:
    """Return a class whose call calls the real one."""

    def call(_: type, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return type(name, (), {"__new__": call})
