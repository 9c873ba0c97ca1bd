"""Distances between a query and rows of a matrix on the CPU; `panels.py` equals them to the bit.

Each call runs the same vector instructions in the same order, so a distance depends on its two
vectors only, never on the rest of a batch. The functions below emit LLVM vector code directly:
loops that a compiler vectorises by itself reach half the speed, and their order of additions
depends on where they are inlined.

Rows are padded with zeros to a multiple of `SIMD_FLOATS` values (`padded_dim`). Smaller is nearer
in every metric: inner product is negated; cosine is the inner product of normalised vectors.
"""

from typing import Any

from llvmlite import ir

from workers.vector.kernels.jit import (
    emitted,
    for_slice,
    inlined,
    insert_function,
    types,
    variable,
)
from workers.vector.kernels.metrics import HALF, INNER_PRODUCT, SINGLE, SQUARED_L2
from workers.vector.kernels.vectors import sum_lanes

SIMD_FLOATS = 16
UNROLLED = 4  # independent sums, so that additions do not wait for each other

_I64, _F32 = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, SIMD_FLOATS)
_ZERO, _ZEROS = ir.Constant(_I64, 0), ir.Constant(_VECTOR, [0.0] * SIMD_FLOATS)


def padded_dim(dim: int) -> int:
    """Return `dim` rounded up to whole SIMD vectors."""
    return -(-dim // SIMD_FLOATS) * SIMD_FLOATS


def _loader(builder: Any, base: Any, stored: int) -> Any:
    """Return a function that emits the load of the vector at element i of an array."""
    element = ir.HalfType() if stored == HALF else _F32
    size = 2 if stored == HALF else 4
    pointer = ir.VectorType(element, SIMD_FLOATS).as_pointer()

    def load(i: Any) -> Any:
        address = builder.add(base, builder.mul(i, ir.Constant(_I64, size)))
        loaded = builder.load(builder.inttoptr(address, pointer))
        loaded.align = size
        return builder.fpext(loaded, _VECTOR) if stored == HALF else loaded

    return load


def _accumulator(builder: Any, row: Any, query: Any, metric: int, stored: int) -> Any:
    """Return a function that emits the addition of terms i to i + SIMD_FLOATS to a sum."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    fma = insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    of_row, of_query = _loader(builder, row, stored), _loader(builder, query, SINGLE)

    def add(total: Any, i: Any) -> Any:
        lhs, rhs = of_row(i), of_query(i)
        if metric == SQUARED_L2:
            lhs = rhs = builder.fsub(lhs, rhs)
        return builder.call(fma, [lhs, rhs, total])

    return add


def _reduction(metric: int, stored: int) -> Any:
    """Make a kernel function: (address of a row, address of a query, padded length) -> float32.

    It has two loops: over UNROLLED vectors at a time, then over the other vectors.
    """

    @emitted(types.float32, types.intp, types.intp, types.intp)
    def reduce(builder: Any, row: Any, query: Any, length: Any) -> Any:
        add = _accumulator(builder, row, query, metric, stored)
        sums = [variable(builder, _ZEROS) for _ in range(UNROLLED)]
        step, stride = (ir.Constant(_I64, SIMD_FLOATS * n) for n in (1, UNROLLED))
        whole = builder.and_(length, ir.Constant(_I64, -stride.constant))
        with for_slice(builder, _ZERO, whole, stride) as (i, _):
            for total in sums:
                builder.store(add(builder.load(total), i), total)
                i = builder.add(i, step)
        with for_slice(builder, whole, length, step) as (i, _):
            builder.store(add(builder.load(sums[0]), i), sums[0])
        first, second, third, fourth = map(builder.load, sums)
        halves = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
        total = sum_lanes(builder, halves, builder.fadd)
        return builder.fneg(total) if metric == INNER_PRODUCT else total

    return reduce


def _widening(stored: int) -> Any:
    """Make a kernel function that copies the vector at one address to another as float32."""

    @emitted(types.void, types.intp, types.intp)
    def widen(builder: Any, source: Any, target: Any) -> None:
        loaded = _loader(builder, source, stored)(_ZERO)
        builder.store(loaded, builder.inttoptr(target, _VECTOR.as_pointer())).align = 4

    return widen


_widen_single, _widen_half = _widening(SINGLE), _widening(HALF)
_l2_single, _l2_half = _reduction(SQUARED_L2, SINGLE), _reduction(SQUARED_L2, HALF)
_dot_single, _dot_half = _reduction(INNER_PRODUCT, SINGLE), _reduction(INNER_PRODUCT, HALF)


@inlined
def distance(row: int, query: int, length: int, metric: int, stored: int) -> Any:
    """Return the distance between the row and the query at two addresses; float32.

    The row is float32 or float16 by `stored`, the query float32; `length` is padded.
    """
    if metric == SQUARED_L2:
        if stored == SINGLE:
            return _l2_single(row, query, length)
        return _l2_half(row, query, length)
    if stored == SINGLE:
        return _dot_single(row, query, length)
    return _dot_half(row, query, length)


@inlined
def load(row: int, out: int, length: int, stored: int) -> None:
    """Copy the row at an address to another as float32; `length` is padded."""
    for i in range(0, length, SIMD_FLOATS):
        if stored == SINGLE:
            _widen_single(row + 4 * i, out + 4 * i)
        else:
            _widen_half(row + 2 * i, out + 4 * i)
