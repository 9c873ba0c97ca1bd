"""A router as bytes, and the router that decides on exactly as that one would.

A snapshot holds all of it: tables, what it has learned, settings and policy table. It is a pickle
of the core's own classes, and only the version that made it is sure to read it. No other class is
made of what is read, nor another module imported, and none of these does anything when it is made;
so a snapshot from elsewhere runs no foreign code. Arrays are plain bytes with the letters of a kind
of numbers: NumPy's own way to make one takes bytes as addresses of objects, where its kind says so.
Nor does a small snapshot grow without a bound. Made for the journal
(`streams/journal/journal.py`), read by replays (`infra/replay`).
"""

import io
import pickle
import zlib
from importlib import import_module
from typing import Any

import numpy as np

from schemas.errors import RecordError
from streams.core.router import Router

_PURE = ("schemas.records", "schemas.fleet", "streams.config")
_CORE = "streams.core."
_CONTAINERS = frozenset(
    {
        ("builtins", "frozenset"),
        ("builtins", "set"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "deque"),
    }
)


_NUMBERS = frozenset(("|b1", "|i1", "|u1", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8"))
STATE_BYTES_MAX = 512 << 20  # of a router, written down
_GROWTH_MAX, _GROWN_BYTES = (
    64,
    16 << 20,
)  # by how much that is more than it is compressed to, or this


def pack_router(router: Router) -> bytes:
    """Return the router's present state as compressed bytes."""
    state = io.BytesIO()
    _Pickler(state, protocol=5).dump(router)
    return zlib.compress(state.getbuffer(), 1)


def _inflate(state: bytes) -> bytes:
    """Raises RecordError for more than a router's state comes to."""
    limit = min(STATE_BYTES_MAX, max(_GROWN_BYTES, _GROWTH_MAX * len(state)))
    inflating = zlib.decompressobj()
    raw_state = inflating.decompress(state, limit)
    if inflating.unconsumed_tail or not inflating.eof:
        raise RecordError(f"expected a whole state of at most {limit} bytes, found another")
    return raw_state


def numbers(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """An array; raises RecordError unless it is one of numbers, and as large as its bytes."""
    if kind not in _NUMBERS or not all(type(length) is int and length >= 0 for length in shape):
        raise RecordError(f"expected numbers, found an array of {kind!r:.40}")
    return np.frombuffer(bytearray(data), kind).reshape(shape)


def number(kind: str, data: bytes) -> Any:
    """One of NumPy's; raises as `numbers`."""
    return numbers(kind, (), data)[()]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Numbers as plain bytes, all else as ever."""
        kind = type(value)
        if kind is np.ndarray:
            return numbers, (value.dtype.str, value.shape, value.tobytes())
        if issubclass(kind, np.generic):
            return number, (value.dtype.str, value.tobytes())
        return NotImplemented


def unpack_router(state: bytes) -> Router:
    """A router that goes on from there; raises RecordError for what is none, or not readable."""
    try:
        router = _Unpickler(io.BytesIO(_inflate(state))).load()
    except Exception as error:  # damaged pickles raise many kinds
        raise RecordError(
            f"a router's state cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(router, Router):
        raise RecordError(f"expected a router's state, found {type(router).__name__}")
    return router


_FACTORIES = {factory.__name__: factory for factory in (numbers, number)}


class _Unpickler(pickle.Unpickler):
    """Makes classes of the router's own and plain containers, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; raises for all that a router's state does not hold."""
        if module == __name__ and name in _FACTORIES:
            return _FACTORIES[name]
        if (module, name) in _CONTAINERS:
            return getattr(import_module(module), name)
        if (module in _PURE or module.startswith(_CORE)) and "." not in name:
            kind = getattr(import_module(module), name, None)
            if isinstance(kind, type) and kind.__module__ == module:
                return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a router")
