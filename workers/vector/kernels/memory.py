"""Reads and writes elements of arrays by address, for inner loops of kernels.

Views of arrays inside kernels count references, and signed indexes are checked for wraparound; both
cost more than the loads themselves. Nothing is checked here: callers stay within arrays that they
keep alive.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from workers.vector.kernels.jit import emitted, inlined, insert_function, types

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def pointer(builder: Any, base: Any, i: Any, element: Any) -> Any:
    """Emit the pointer to element `i` of an array at `base`.

    It is an array access for LLVM, so that the compiler can vectorise loops over i.
    """
    return builder.gep(builder.inttoptr(base, element.as_pointer()), [i])


def _getter(kind: Any, element: Any) -> Any:
    """Make a kernel function that returns element `i` of an array at `base`."""

    @emitted(kind, types.intp, types.intp)
    def get(builder: Any, base: Any, i: Any) -> Any:
        return builder.load(pointer(builder, base, i, element))

    return get


def _setter(kind: Any, element: Any) -> Any:
    """Make a kernel function that writes `value` to element `i` of an array at `base`."""

    @emitted(types.void, types.intp, types.intp, kind)
    def put(builder: Any, base: Any, i: Any, value: Any) -> None:
        builder.store(value, pointer(builder, base, i, element))

    return put


get_u32, put_u32 = _getter(types.uint32, _I32), _setter(types.uint32, _I32)
put_i16 = _setter(types.int16, ir.IntType(16))
get_i64, put_i64 = _getter(types.int64, _I64), _setter(types.int64, _I64)
get_u64, put_u64 = _getter(types.uint64, _I64), _setter(types.uint64, _I64)
get_f32 = _getter(types.float32, ir.FloatType())
put_f32 = _setter(types.float32, ir.FloatType())


@inlined
def add_i64(base: int, i: int, amount: int) -> None:
    """Add to element `i` of an array at `base`."""
    put_i64(base, i, get_i64(base, i) + amount)


@emitted(types.void, types.intp)
def prefetch(builder: Any, place: Any) -> None:
    """Prefetch the cache line at an address."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(_I32, hint) for hint in (0, 3, 1)]  # to read, near, data
    builder.call(function, [builder.inttoptr(place, pointer), *hints])


@inlined
def prefetch_row(row: int, row_bytes: int) -> None:
    """Prefetch all cache lines of a row of `row_bytes` bytes at an address."""
    for offset in range(0, row_bytes, 64):
        prefetch(row + offset)


@inlined
def address(array: Any) -> Any:
    """Return the address of an array, which the kernel keeps alive while it uses the address."""
    return np.intp(array.ctypes.data)


@inlined
def has_bit(bits: int, row: int) -> bool:
    """Return whether a row is in the bit set at an address (`arrays.pack_bits`)."""
    bit: bool = (get_u32(bits, row >> 5) >> np.uint32(row & 31)) & np.uint32(1) != np.uint32(0)
    return bit
