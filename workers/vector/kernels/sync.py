"""Synchronization of threads that share an array without the interpreter's lock, for kernels.

It has ordered loads and stores (acquire and release), a sequentially consistent exchange, event
counters of the operating system (`eventfd`) to sleep and to wake, and the clock. Addresses are
integers, as in `memory.py`.
"""

from typing import Any

from llvmlite import ir

from workers.vector.kernels.jit import emitted, insert_function, types
from workers.vector.kernels.memory import pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_MONOTONIC = 1  # CLOCK_MONOTONIC
_BYTES = 8  # of an element


@emitted(types.int64, types.intp, types.intp)
def load(builder: Any, base: Any, i: Any) -> Any:
    """Load element `i` of the int64 at `base`; no later access moves before it (acquire)."""
    return builder.load_atomic(pointer(builder, base, i, _I64), "acquire", _BYTES)


@emitted(types.void, types.intp, types.intp, types.int64)
def store(builder: Any, base: Any, i: Any, value: Any) -> None:
    """Store element `i` of the int64 at `base`; no earlier access moves behind it (release)."""
    builder.store_atomic(value, pointer(builder, base, i, _I64), "release", _BYTES)


@emitted(types.int64, types.intp, types.intp, types.int64)
def exchange(builder: Any, base: Any, i: Any, value: Any) -> Any:
    """Store element `i` of the int64 at `base` and return the old value, in one total order."""
    return builder.atomic_rmw("xchg", pointer(builder, base, i, _I64), value, "seq_cst")


def _call(builder: Any, name: str, result: Any, *values: Any) -> None:
    """Call a function of the C library."""
    kind = ir.FunctionType(result, [value.type for value in values])
    builder.call(insert_function(builder.module, kind, name), values)


@emitted(types.void, types.int64, types.intp)
def sleep(builder: Any, counter: Any, buffer: Any) -> None:
    """Wait until an event counter is not 0, and reset it; a non-blocking one does not wait.

    `buffer` is the address of 8 bytes, which get the old value."""
    _call(builder, "read", _I64, builder.trunc(counter, _I32), buffer, ir.Constant(_I64, _BYTES))


@emitted(types.void, types.int64, types.intp)
def wake(builder: Any, counter: Any, amount: Any) -> None:
    """Add the int64 at the address `amount` to an event counter."""
    _call(builder, "write", _I64, builder.trunc(counter, _I32), amount, ir.Constant(_I64, _BYTES))


@emitted(types.void, types.intp)
def read_clock(builder: Any, buffer: Any) -> None:
    """Write the monotonic time to two int64 at an address: seconds, nanoseconds."""
    _call(builder, "clock_gettime", _I32, ir.Constant(_I32, _MONOTONIC), buffer)
