"""What two threads need to work on one array without the interpreter's lock: for kernels.

Loads and stores in order (acquire and release), an exchange that everybody sees at once, event
counters of the kernel (`eventfd`) to sleep and to wake with, and the clock. Addresses are integers,
as in `memory.py`.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from workers.search.kernels.jit import insert_function, intrinsic, types
from workers.search.kernels.memory import pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_MONOTONIC = 1  # CLOCK_MONOTONIC
_BYTES = 8  # of all elements


@intrinsic
def load(context: Any, base: Any, i: Any) -> Any:
    """Element `i` of the int64 at `base`; nothing that follows is done before."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, i = arguments
        place = pointer(builder, base, i, _I64)
        return builder.load_atomic(place, "acquire", _BYTES)

    return types.int64(types.intp, types.intp), generate


@intrinsic
def store(context: Any, base: Any, i: Any, value: Any) -> Any:
    """Write element `i` of the int64 at `base`, after all that comes before."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, i, value = arguments
        place = pointer(builder, base, i, _I64)
        builder.store_atomic(value, place, "release", _BYTES)
        return _context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


@intrinsic
def exchange(context: Any, base: Any, i: Any, value: Any) -> Any:
    """Write element `i` of the int64 at `base` and return what was there; one order for all."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, i, value = arguments
        place = pointer(builder, base, i, _I64)
        return builder.atomic_rmw("xchg", place, value, "seq_cst")

    return types.int64(types.intp, types.intp, types.int64), generate


def _called(name: str, result: Any, arguments: list[Any]) -> Callable[..., Any]:
    """What generates a call of the C library."""

    def call(builder: Any, *values: Any) -> Any:
        kind = ir.FunctionType(result, arguments)
        return builder.call(insert_function(builder.module, kind, name), values)

    return call


_read = _called("read", _I64, [_I32, _I64, _I64])
_write = _called("write", _I64, [_I32, _I64, _I64])
_clock = _called("clock_gettime", _I32, [_I32, _I64])


@intrinsic
def sleep(context: Any, counter: Any, room: Any) -> Any:
    """Wait until an event counter is not 0, unless it is one that never waits, and set it to 0; 8
    bytes of room, at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter, room = arguments
        _read(builder, builder.trunc(counter, _I32), room, ir.Constant(_I64, _BYTES))
        return _context.get_dummy_value()

    return types.void(types.int64, types.intp), generate


@intrinsic
def wake(context: Any, counter: Any, one: Any) -> Any:
    """Add to an event counter what stands at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter, one = arguments
        _write(builder, builder.trunc(counter, _I32), one, ir.Constant(_I64, _BYTES))
        return _context.get_dummy_value()

    return types.void(types.int64, types.intp), generate


@intrinsic
def read_clock(context: Any, room: Any) -> Any:
    """Put the time into two int64 at an address: seconds, nanoseconds."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _clock(builder, ir.Constant(_I32, _MONOTONIC), arguments[0])
        return _context.get_dummy_value()

    return types.void(types.intp), generate
