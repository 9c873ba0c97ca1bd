"""Elements of arrays by address, for inner loops of kernels.

Views of arrays inside kernels count references, and signed indexes are checked for wrapping round;
both cost more than the loads themselves. Nothing here checks anything: callers stay within arrays
that they keep alive.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from workers.search.kernels.jit import inlined, insert_function, intrinsic, types

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def pointer(builder: Any, base: Any, i: Any, element: Any) -> Any:
    """Of element `i` of an array at `base`, while code is generated.

    Written as an array's element, so that the compiler can vectorise loops over i.
    """
    return builder.gep(builder.inttoptr(base, element.as_pointer()), [i])


def _getter(kind: Any, element: Any) -> Any:
    @intrinsic
    def get(context: Any, base: Any, i: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            base, i = arguments
            return builder.load(pointer(builder, base, i, element))

        return kind(types.intp, types.intp), generate

    return get


def _setter(kind: Any, element: Any) -> Any:
    @intrinsic
    def put(context: Any, base: Any, i: Any, value: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            base, i, value = arguments
            builder.store(value, pointer(builder, base, i, element))
            return _context.get_dummy_value()

        return types.void(types.intp, types.intp, kind), generate

    return put


get_u32, put_u32 = _getter(types.uint32, _I32), _setter(types.uint32, _I32)
put_i16 = _setter(types.int16, ir.IntType(16))
get_i64, put_i64 = _getter(types.int64, _I64), _setter(types.int64, _I64)
get_u64, put_u64 = _getter(types.uint64, _I64), _setter(types.uint64, _I64)
get_f32 = _getter(types.float32, ir.FloatType())
put_f32 = _setter(types.float32, ir.FloatType())


@intrinsic
def prefetch(context: Any, place: Any) -> Any:
    """Ask for the cache line at an address before it is needed."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = insert_function(builder.module, kind, "llvm.prefetch.p0")
        hints = [ir.Constant(_I32, hint) for hint in (0, 3, 1)]  # to read, near, data
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *hints])
        return _context.get_dummy_value()

    return types.void(types.intp), generate


@inlined
def prefetch_row(row: int, row_bytes: int) -> None:
    """Ask for all cache lines of a row."""
    for offset in range(0, row_bytes, 64):
        prefetch(row + offset)


@inlined
def address(array: Any) -> Any:
    """Where an array begins."""
    return np.intp(array.ctypes.data)
