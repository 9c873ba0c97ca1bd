"""Distances between a query and rows of a matrix: the one place that computes them on the CPU.

Each call runs the same vector instructions in the same order, whatever runs beside it, so a
distance depends on its two vectors only and results never depend on batch mates. The intrinsics
below write LLVM vector code directly: loops that a compiler vectorises by itself reach half the
speed, and their order of additions changes with the place that they are inlined into.

Rows are padded with zeros to a multiple of `SIMD_FLOATS` values (`padded`). Smaller is nearer in
every metric: inner product is negated; cosine is inner product of vectors that were normalised.
"""

from typing import Any

from llvmlite import ir

from workers.search.kernels.jit import inlined, insert_function, intrinsic, types
from workers.search.kernels.metrics import HALF, INNER_PRODUCT, SINGLE, SQUARED_L2

SIMD_FLOATS = 16
_UNROLLED = 4  # independent sums, or each addition waits for the one before

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, SIMD_FLOATS)


def padded(dim: int) -> int:
    """`dim` rounded up to whole vectors."""
    return -(-dim // SIMD_FLOATS) * SIMD_FLOATS


def _horizontal_sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector's values, as a fixed tree."""
    values = SIMD_FLOATS
    while values > 1:
        values //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        mask = ir.VectorType(_I32, values)
        low = ir.Constant(mask, list(range(values)))
        high = ir.Constant(mask, list(range(values, 2 * values)))
        vector = builder.fadd(
            builder.shuffle_vector(vector, undefined, low),
            builder.shuffle_vector(vector, undefined, high),
        )
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _loader(builder: Any, base: Any, stored: int) -> Any:
    """Code that loads the vector that begins at element i of an array."""
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
    """Code that adds the terms of elements i to i + SIMD_FLOATS to a sum."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    fma = insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    of_row, of_query = _loader(builder, row, stored), _loader(builder, query, SINGLE)

    def add(total: Any, i: Any) -> Any:
        left, right = of_row(i), of_query(i)
        if metric == SQUARED_L2:
            left = right = builder.fsub(left, right)
        return builder.call(fma, [left, right, total])

    return add


def _reduction(metric: int, stored: int) -> Any:
    """An intrinsic: (address of a row, address of a query, padded length) -> float32."""

    @intrinsic
    def reduce(context: Any, row: Any, query: Any, length: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            addresses_and_length: list[Any] = arguments
            return _reduce(builder, *addresses_and_length, metric=metric, stored=stored)

        return types.float32(types.intp, types.intp, types.intp), generate

    return reduce


def _reduce(builder: Any, row: Any, query: Any, length: Any, *, metric: int, stored: int) -> Any:
    """Two loops: several vectors at a time, then the rest one by one."""
    add = _accumulator(builder, row, query, metric, stored)
    zero, stride = ir.Constant(_VECTOR, [0.0] * SIMD_FLOATS), SIMD_FLOATS * _UNROLLED
    entry = builder.block
    names = ("many_test", "many", "one_test", "one", "done")
    many_test, many, one_test, one, done = (builder.append_basic_block(name) for name in names)
    whole = builder.and_(length, ir.Constant(_I64, -stride))
    builder.branch(many_test)

    builder.position_at_end(many_test)
    i = builder.phi(_I64)
    sums = [builder.phi(_VECTOR) for _ in range(_UNROLLED)]
    i.add_incoming(ir.Constant(_I64, 0), entry)
    for total in sums:
        total.add_incoming(zero, entry)
    builder.cbranch(builder.icmp_signed("<", i, whole), many, one_test)

    builder.position_at_end(many)
    for part, total in enumerate(sums):
        at = builder.add(i, ir.Constant(_I64, part * SIMD_FLOATS))
        total.add_incoming(add(total, at), many)
    i.add_incoming(builder.add(i, ir.Constant(_I64, stride)), many)
    builder.branch(many_test)

    builder.position_at_end(one_test)
    j, rest = builder.phi(_I64), builder.phi(_VECTOR)
    j.add_incoming(i, many_test)
    rest.add_incoming(sums[0], many_test)
    builder.cbranch(builder.icmp_signed("<", j, length), one, done)

    builder.position_at_end(one)
    rest.add_incoming(add(rest, j), one)
    j.add_incoming(builder.add(j, ir.Constant(_I64, SIMD_FLOATS)), one)
    builder.branch(one_test)

    builder.position_at_end(done)
    halves = builder.fadd(builder.fadd(rest, sums[1]), builder.fadd(sums[2], sums[3]))
    total = _horizontal_sum(builder, halves)
    return builder.fneg(total) if metric == INNER_PRODUCT else total


def _widening(stored: int) -> Any:
    """An intrinsic: copies the vector at one address to another as float32."""

    @intrinsic
    def widen(context: Any, source: Any, target: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            zero = ir.Constant(_I64, 0)
            loaded = _loader(builder, arguments[0], stored)(zero)
            to = builder.inttoptr(arguments[1], _VECTOR.as_pointer())
            builder.store(loaded, to).align = 4
            return _context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return widen


_widen_single, _widen_half = _widening(SINGLE), _widening(HALF)
_l2_single, _l2_half = _reduction(SQUARED_L2, SINGLE), _reduction(SQUARED_L2, HALF)
_dot_single, _dot_half = _reduction(INNER_PRODUCT, SINGLE), _reduction(INNER_PRODUCT, HALF)


@inlined
def distance(row: int, query: int, length: int, metric: int, stored: int) -> Any:
    """Distance between the row and the query at two addresses; float32, smaller is nearer.

    The row is float32 or float16, as `stored` says, the query float32; `length` is padded.
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
