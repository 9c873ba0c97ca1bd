"""Finds rows that may be near queries by products of blocks, as LLVM code.

Rows are stored in *panels* of 32, dimension by dimension, and queries in groups of 4 in the same
way, so each loaded value takes part in many products. A matrix library is as fast on one thread,
but its own threads wait for each other by spinning, and all products would be written and read
again. Sums are in another order than those of `distances.py`: callers that need distances measure
the rows found here again.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.distances import SIMD_FLOATS
from workers.vector.kernels.jit import emitted, for_slice, insert_function, types, variable
from workers.vector.kernels.vectors import splat

PANEL_ROWS, GROUP = 2 * SIMD_FLOATS, 4

_I64, _F32 = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, SIMD_FLOATS)
_ZERO, _ZEROS = ir.Constant(_I64, 0), ir.Constant(_VECTOR, [0.0] * SIMD_FLOATS)
_LANES, _LANES_BYTES = ir.IntType(SIMD_FLOATS), ir.Constant(_I64, 4 * SIMD_FLOATS)


def panels(vectors: Array) -> Array:
    """Store `vectors`, float32 (rows, dim), in panels: float32 (panels, dim, PANEL_ROWS)."""
    rows, dim = vectors.shape
    count = -(-rows // PANEL_ROWS)
    whole = np.zeros((count * PANEL_ROWS, dim), np.float32)
    whole[:rows] = vectors
    return np.ascontiguousarray(whole.reshape(count, PANEL_ROWS, dim).transpose(0, 2, 1))


def _at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """Return a pointer to the value at an address plus an offset."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def _load(builder: Any, base: Any, offset: Any) -> Any:
    loaded = builder.load(_at(builder, base, offset, _VECTOR))
    loaded.align = 4
    return loaded


@emitted(types.void, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def nearer(
    builder: Any, panel: Any, group: Any, dim: Any, lengths: Any, worst: Any, out: Any
) -> None:
    """Find the rows of a panel whose value for a query of a group is less than its worst.

    The value is the row's length minus twice the product. All are addresses: of a panel, float32
    (dim, PANEL_ROWS), of queries, float32 (dim, GROUP), of the rows' `lengths`, float32
    (PANEL_ROWS,), and of `worst`, float32 (GROUP,). `out` gets the values, float32 (GROUP,
    PANEL_ROWS), then a bit set for each query, uint32 (GROUP,).
    """
    sums = [[variable(builder, _ZEROS) for _ in range(2)] for _ in range(GROUP)]
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    fma = insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    with for_slice(builder, _ZERO, dim, ir.Constant(_I64, 1)) as (i, _):
        at = builder.mul(i, ir.Constant(_I64, 4 * PANEL_ROWS))
        rows = [_load(builder, panel, at), _load(builder, panel, builder.add(at, _LANES_BYTES))]
        for j in range(GROUP):
            place = builder.mul(i, ir.Constant(_I64, 4 * GROUP))
            place = builder.add(place, ir.Constant(_I64, 4 * j))
            value = splat(builder, builder.load(_at(builder, group, place, _F32)), SIMD_FLOATS)
            for half, total in zip(rows, sums[j], strict=True):
                builder.store(builder.call(fma, [half, value, builder.load(total)]), total)
    twice = ir.Constant(_VECTOR, [-2.0] * SIMD_FLOATS)
    for j in range(GROUP):
        limit = builder.load(_at(builder, worst, ir.Constant(_I64, 4 * j), _F32))
        limit = splat(builder, limit, SIMD_FLOATS)
        for half, total in enumerate(sums[j]):
            squares = _load(builder, lengths, ir.Constant(_I64, 4 * SIMD_FLOATS * half))
            dist = builder.call(fma, [builder.load(total), twice, squares])
            to = ir.Constant(_I64, 4 * (PANEL_ROWS * j + SIMD_FLOATS * half))
            builder.store(dist, _at(builder, out, to, _VECTOR)).align = 4
            bits = builder.bitcast(builder.fcmp_ordered("<", dist, limit), _LANES)
            to = ir.Constant(_I64, 4 * PANEL_ROWS * GROUP + 4 * j + SIMD_FLOATS // 8 * half)
            builder.store(bits, _at(builder, out, to, _LANES)).align = 2


@emitted(types.int64, types.uint32)
def lowest(builder: Any, bits: Any) -> Any:
    """Return the place of the lowest set bit; `bits` must not be 0."""
    kind = ir.FunctionType(bits.type, [bits.type, ir.IntType(1)])
    function = insert_function(builder.module, kind, "llvm.cttz.i32")
    return builder.zext(builder.call(function, [bits, ir.Constant(ir.IntType(1), 1)]), _I64)
