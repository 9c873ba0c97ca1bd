"""A router as bytes, and the router that decides on exactly as that one would.

A snapshot holds all of it: tables, what it has learned, settings and policy table. It is a pickle
of the core's own classes, and only the version that made it is sure to read it. No other class is
made of what is read, nor another module imported, and none of these does anything when it is made;
so a snapshot from elsewhere runs no foreign code. Made for the journal
(`streams/journal/journal.py`), read by replays (`infra/replay`).
"""

import io
import pickle
import zlib
from importlib import import_module
from typing import Any

from schemas.errors import RecordError
from streams.core.router import Router

_PURE = ("schemas.records", "schemas.fleet", "streams.config")
_CORE = "streams.core."
_OTHERS = frozenset(
    {
        ("builtins", "frozenset"),
        ("builtins", "set"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "deque"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy._core.numeric", "_frombuffer"),
    }
)


def packed(router: Router) -> bytes:
    """The router as it is now."""
    return zlib.compress(pickle.dumps(router, protocol=5), 1)


def unpacked(state: bytes) -> Router:
    """A router that goes on from there; raises RecordError for what is none, or not readable."""
    try:
        router = _Unpickler(io.BytesIO(zlib.decompress(state))).load()
    except Exception as error:  # damaged pickles raise many kinds
        raise RecordError(
            f"a router's state cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(router, Router):
        raise RecordError(f"expected a router's state, found {type(router).__name__}")
    return router


class _Unpickler(pickle.Unpickler):
    """Makes classes of the router's own and plain containers, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; raises for all that a router's state does not hold."""
        if (module, name) in _OTHERS:
            return getattr(import_module(module), name)
        if (module in _PURE or module.startswith(_CORE)) and "." not in name:
            found = getattr(import_module(module), name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a router")
