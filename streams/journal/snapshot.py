"""Serializes a router to bytes, and restores one that decides exactly as the first would.

A snapshot has all state: tables, estimates, settings and policy table. It is a pickle of the core's
own classes, and only the version that made it is sure to read it. Reading creates no other classes
and imports no other modules, and none of these classes runs code when it is created; so a snapshot
from elsewhere runs no foreign code. Arrays are plain bytes with a numeric dtype: NumPy's own
unpickling would take bytes as addresses of objects for an object dtype. A limit bounds the
decompressed size. Made for the journal (`streams/journal/journal.py`), read by replays.
"""

import asyncio
import gc
import io
import os
import pickle
import signal
import zlib
from importlib import import_module
from typing import Any

import numpy as np

from schemas.errors import RecordError, TriviumError
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
STATE_BYTES_MAX = 512 << 20  # of a router's state, not compressed
_GROWTH_MAX, _GROWN_BYTES = (
    64,
    16 << 20,
)  # limit: this multiple of the compressed size, or this many bytes if that is more


def pack_router(router: Router) -> bytes:
    """Return the router's current state as compressed bytes."""
    state = io.BytesIO()
    _Pickler(state, protocol=5).dump(router)
    return zlib.compress(state.getbuffer(), 1)


def _inflate(state: bytes) -> bytes:
    """Decompress a state. Raise RecordError if it is incomplete or larger than the limit."""
    limit = min(STATE_BYTES_MAX, max(_GROWN_BYTES, _GROWTH_MAX * len(state)))
    inflating = zlib.decompressobj()
    raw_state = inflating.decompress(state, limit)
    if inflating.unconsumed_tail or not inflating.eof:
        raise RecordError(f"expected a whole state of at most {limit} bytes, found another")
    return raw_state


def numbers(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """Return an array of this dtype and shape. Raise RecordError unless the dtype is numeric."""
    if kind not in _NUMBERS or not all(type(length) is int and length >= 0 for length in shape):
        raise RecordError(f"expected numbers, found an array of {kind!r:.40}")
    return np.frombuffer(bytearray(data), kind).reshape(shape)


def number(kind: str, data: bytes) -> Any:
    """Return a NumPy scalar of this dtype. Raise RecordError as `numbers` does."""
    return numbers(kind, (), data)[()]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce NumPy arrays and scalars to plain bytes, and leave the rest to pickle."""
        kind = type(value)
        if kind is np.ndarray:
            return numbers, (value.dtype.str, value.shape, value.tobytes())
        if issubclass(kind, np.generic):
            return number, (value.dtype.str, value.tobytes())
        return NotImplemented


def unpack_router(state: bytes) -> Router:
    """Return the router of a snapshot. Raise RecordError if it is unreadable or no router."""
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
    """Creates the router's own classes and plain containers, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class. Raise UnpicklingError for classes that no router's state has."""
        if module == __name__ and name in _FACTORIES:
            return _FACTORIES[name]
        if (module, name) in _CONTAINERS:
            return getattr(import_module(module), name)
        if (module in _PURE or module.startswith(_CORE)) and "." not in name:
            kind = getattr(import_module(module), name, None)
            if isinstance(kind, type) and kind.__module__ == module:
                return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a router")


_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def snapshot_in_fork(router: Router) -> bytes:
    """Return the router's state at the call, serialized in a fork, so that routing goes on.

    Serializing a large state takes a second and more, longer than a lease may be in doubt. A fork
    has the state as of that moment, writes it to a pipe, and ends; signals end it, and it uses no
    connection. Raise TriviumError if it fails.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _write_and_exit(router, write_end)
    os.close(write_end)
    return await asyncio.to_thread(_read, child, read_end)


def _write_and_exit(router: Router, write_end: int) -> None:
    """Write the snapshot to the pipe in the fork, and exit."""
    code = 1
    try:
        gc.disable()  # collected connections would close the router's ones too
        signal.set_wakeup_fd(-1)  # the descriptor belongs to the router
        for signal_number in _HEEDED:
            signal.signal(signal_number, signal.SIG_DFL)
        with os.fdopen(write_end, "wb") as out:
            out.write(pack_router(router))
        code = 0
    finally:
        os._exit(code)


def _read(child: int, read_end: int) -> bytes:
    with os.fdopen(read_end, "rb") as pipe:
        state = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise TriviumError(f"a router's state was not written down: status {status}")
    return state
