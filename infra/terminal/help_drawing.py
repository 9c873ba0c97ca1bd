"""Makes typer's drawing of help ready, without what our help never shows.

typer's module for it imports how rich draws Markdown and tracebacks, and so a highlighter of
programs and a parser of Markdown: more than half of what `trivium --help` would take. Our help is
rich's own markup, and errors are one line. Both names are still there, for whoever calls them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_SPARED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


def ready() -> None:
    """Import the module, if it is not there yet."""
    with _stand_ins():
        import_module("typer.rich_utils")


@contextmanager
def _stand_ins() -> Iterator[None]:
    absent = [module for module in _SPARED if module not in sys.modules]
    for module in absent:
        stand_in = ModuleType(module)
        setattr(stand_in, _SPARED[module], _later(module, _SPARED[module]))
        sys.modules[module] = stand_in
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module]


def _later(module: str, name: str) -> type:
    """A class whose making makes one of the real class, imported then."""

    def make(_: type, *given: Any, **named: Any) -> Any:
        return getattr(import_module(module), name)(*given, **named)

    return type(name, (), {"__new__": make})
