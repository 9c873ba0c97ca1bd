"""Rows in panels: distances of sixteen at a time, and the nearest of many, as LLVM code.

A *panel* stores sixteen rows dimension by dimension. So one instruction processes one dimension of
all of its rows, and no sum across a vector is needed at the end. The sums are those of
`distances.py`, addend by addend, so that a distance is the same to the bit in both.

The nearest rows are sorted keys in two vector registers while all panels are read. A key is
inserted without a branch: each place takes the greater of the key and its left neighbour, unless
its own key is smaller.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.distances import SIMD_FLOATS, UNROLLED
from workers.vector.kernels.jit import (
    emitted,
    for_slice,
    insert_function,
    kernel,
    types,
    variable,
)
from workers.vector.kernels.metrics import INNER_PRODUCT, SQUARED_L2
from workers.vector.kernels.vectors import splat

PANEL_ROWS = SIMD_FLOATS
PANEL_DIM_MAX = 64  # for longer rows, codes are as fast
NEAREST_MAX = 16  # keys in two vector registers
_HALF, _STEP = NEAREST_MAX // 2, 8

_BIT, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _WORDS = ir.VectorType(_F32, PANEL_ROWS), ir.VectorType(_I32, PANEL_ROWS)
_KEYS = ir.VectorType(_I64, _HALF)
_BITS = ir.IntType(PANEL_ROWS)
_NO_BITS = ir.Constant(_BITS, 0)
_ZERO, _ZEROS = ir.Constant(_I64, 0), ir.Constant(_VECTOR, [0.0] * PANEL_ROWS)
_PANEL = 4 * PANEL_ROWS  # bytes of one dimension


def panels(vectors: Array, dim: int) -> Array:
    """Store rows of `vectors`, (rows, padded dim), as float32 (panels, panel dim, PANEL_ROWS).

    The last panel is filled up with zeros. Dimensions are in the order in which they are added:
    those with the same place in a vector follow each other. `dim` is the dimension without padding.
    """
    rows = len(vectors)
    whole = np.zeros((-(-rows // PANEL_ROWS) * PANEL_ROWS, panel_dim(dim)), np.float32)
    whole[:rows] = vectors[:, : whole.shape[1]]
    by_dimension = whole.reshape(-1, PANEL_ROWS, whole.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(by_dimension[:, _order(whole.shape[1])])


def panel_dim(dim: int) -> int:
    """Return the dimensions of a panel, a multiple of `_STEP`; each has its own code."""
    return -(-dim // _STEP) * _STEP


def _order(dims: int) -> list[int]:
    """Return the order in which the dimensions of a panel are added."""
    return [d for place in range(SIMD_FLOATS) for d in range(place, dims, SIMD_FLOATS)]


def pad_to_panel(rows: Array) -> Array:
    """Copy rows, int64, to memory that is padded to whole panels."""
    out = np.zeros(-(-len(rows) // PANEL_ROWS) * PANEL_ROWS, np.int64)
    out[: len(rows)] = rows
    return out[: len(rows)]


def _n(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """Return a pointer to the value at an address plus an offset."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def _load(builder: Any, base: Any, offset: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(_at(builder, base, offset, kind))
    loaded.align = align
    return loaded


def _term(builder: Any, panel: Any, query: Any, metric: int) -> Callable[[Any, Any, Any], Any]:
    """Return a function that emits the code to add one dimension's terms to the rows' sums.

    The dimension is the n-th of a panel, and the d-th of the query.
    """
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    fma = insert_function(builder.module, kind, "llvm.fmuladd.v16f32")

    def add(total: Any, n: Any, d: Any) -> Any:
        lhs = _load(builder, panel, builder.mul(n, _n(_PANEL)), _VECTOR, 4)
        value = _load(builder, query, builder.mul(d, _n(4)), _F32, 4)
        rhs = splat(builder, value, PANEL_ROWS)
        if metric == SQUARED_L2:
            lhs = rhs = builder.fsub(lhs, rhs)
        return builder.call(fma, [lhs, rhs, total])

    return add


def _distances(builder: Any, panel: Any, query: Any, dims: int, metric: int) -> Any:
    """Emit the code of the distances of a panel's rows, in the order of `distances.py`.

    There dimension d is in place d % SIMD_FLOATS of a vector. Vectors are added to UNROLLED sums in
    turn if there are as many, else to the first sum, and the places are added as a tree. Terms that
    are left out here are zero there.
    """
    add, at = _term(builder, panel, query, metric), 0
    in_turn = dims > (UNROLLED - 1) * SIMD_FLOATS
    places = []
    for place in range(SIMD_FLOATS):
        sums = [_ZEROS] * UNROLLED
        for i, d in enumerate(range(place, dims, SIMD_FLOATS)):
            sum_index = i if in_turn else 0
            sums[sum_index] = add(sums[sum_index], _n(at), _n(d))
            at += 1
        places.append(_sum(builder, sums) if in_turn else sums[0])
    return _tree(builder, places, metric)


def _sum(builder: Any, sums: list[Any]) -> Any:
    first, second, third, fourth = sums
    return builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))


def _tree(builder: Any, places: list[Any], metric: int) -> Any:
    while len(places) > 1:
        half = len(places) // 2
        places = [builder.fadd(places[i], places[i + half]) for i in range(half)]
    return builder.fneg(places[0]) if metric == INNER_PRODUCT else places[0]


def _sortable_words(builder: Any, distances: Any) -> Any:
    """Emit the code that maps distances to unsigned words in the same order, as in `keys.py`."""
    bits = builder.bitcast(builder.fadd(distances, _ZEROS), _WORDS)
    sign = builder.ashr(bits, ir.Constant(_WORDS, [31] * PANEL_ROWS))
    return builder.xor(bits, builder.or_(sign, ir.Constant(_WORDS, [0x80000000] * PANEL_ROWS)))


@emitted(
    types.void, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp
)  # fmt: skip
def _measure(
    builder: Any, panels: Any, count: Any, query: Any, dims: Any, metric: Any, out: Any
) -> None:
    """Emit the code of `measure`: one loop for each size of a panel and each metric."""
    end_block = builder.append_basic_block("done")
    chosen = builder.switch(builder.add(dims, metric), end_block)
    for size in range(_STEP, PANEL_DIM_MAX + 1, _STEP):
        for number in (SQUARED_L2, INNER_PRODUCT):
            block = builder.append_basic_block(f"measure_{size}_{number}")
            chosen.add_case(_n(size + number), block)
            builder.position_at_end(block)
            with for_slice(builder, _ZERO, count, _n(1)) as (i, _):
                panel = builder.add(panels, builder.mul(i, _n(_PANEL * size)))
                distances = _distances(builder, panel, query, size, number)
                to = _at(builder, out, builder.mul(i, _n(_PANEL)), _VECTOR)
                builder.store(distances, to).align = 4
            builder.branch(end_block)
    builder.position_at_end(end_block)


@kernel
def measure(panels: int, count: int, query: int, dims: int, metric: int, out: int) -> None:
    """Compute the distances of the rows of `count` panels to a query, equal to `distance`'s.

    All are addresses: `panels` of float32 (count, dims, PANEL_ROWS), the query of float32, at least
    (dims,), and `out` of float32 (count, PANEL_ROWS). `metric` is a number of `metrics.py`.
    """
    _measure(panels, count, query, dims, metric, out)


@emitted(types.uint32, types.intp, types.float32)
def within(builder: Any, distances: Any, limit: Any) -> Any:
    """Return a bit for each of a panel's distances, at an address, that is within the limit."""
    near = builder.fcmp_ordered(
        "<=", _load(builder, distances, _ZERO, _VECTOR, 4), splat(builder, limit, PANEL_ROWS)
    )
    return builder.zext(builder.bitcast(near, _BITS), _I32)


def _keys_of(builder: Any, distances: Any, rows: Any, offset: Any) -> list[Any]:
    """Emit the code of the keys of a panel's distances and rows, int64 at an address: 2 vectors."""
    ordered, keys = _sortable_words(builder, distances), []
    for half in range(2):
        mask = ir.Constant(
            ir.VectorType(_I32, _HALF), list(range(_HALF * half, _HALF * (half + 1)))
        )
        part = builder.shuffle_vector(ordered, ir.Constant(_WORDS, ir.Undefined), mask)
        high = builder.shl(builder.zext(part, _KEYS), ir.Constant(_KEYS, [32] * _HALF))
        at = builder.add(offset, _n(8 * _HALF * half))
        row = builder.shl(_load(builder, rows, at, _KEYS, 8), ir.Constant(_KEYS, [1] * _HALF))
        keys.append(builder.or_(high, row))
    return keys


@emitted(types.void, types.intp, types.intp, types.intp, types.intp, types.intp)
def choose(builder: Any, distances: Any, count: Any, rows: Any, keys: Any, size: Any) -> None:
    """Insert the nearest of `count` rows into a list of `size` keys, at most NEAREST_MAX.

    `distances`, float32, and `rows`, int64, are addresses of arrays that are padded to whole
    panels; `keys` is that of the list, uint64, ascending, which has none of the rows.
    """
    free = builder.sub(_n(NEAREST_MAX), size)  # unused places, before the list
    start = builder.sub(keys, builder.mul(free, _n(8)))
    pointer, mask_type = _KEYS.as_pointer(), ir.VectorType(_BIT, _HALF)
    load_type = ir.FunctionType(_KEYS, [pointer, _I32, mask_type, _KEYS])
    store_type = ir.FunctionType(ir.VoidType(), [_KEYS, pointer, _I32, mask_type])
    load = insert_function(builder.module, load_type, "llvm.masked.load.v8i64.p0")
    store = insert_function(builder.module, store_type, "llvm.masked.store.v8i64.p0")
    aligned, none = ir.Constant(_I32, 8), ir.Constant(_KEYS, [0] * _HALF)
    vectors, places, used = [], [], []
    for half in range(2):
        numbers = ir.Constant(_KEYS, list(range(_HALF * half, _HALF * (half + 1))))
        used.append(builder.icmp_signed(">=", numbers, splat(builder, free, _HALF)))
        places.append(_at(builder, start, _n(8 * _HALF * half), _KEYS))
        vectors.append(variable(builder, none))
        loaded = builder.call(load, [places[half], aligned, used[half], none])
        builder.store(loaded, vectors[half])
    _nearest(builder, distances, count, rows, vectors)
    for half in range(2):
        builder.call(store, [builder.load(vectors[half]), places[half], aligned, used[half]])


def _nearest(builder: Any, distances: Any, count: Any, rows: Any, vectors: list[Any]) -> None:
    """Emit the code that inserts near rows into two vectors, panel by panel."""
    scratch = variable(builder, ir.Constant(ir.ArrayType(_KEYS, 2), ir.Undefined))
    here, bits_left = builder.ptrtoint(scratch, _I64), variable(builder, _NO_BITS)
    lowest = insert_function(
        builder.module, ir.FunctionType(_BITS, [_BITS, _BIT]), f"llvm.cttz.i{PANEL_ROWS}"
    )
    numbers = ir.Constant(ir.VectorType(_I64, PANEL_ROWS), list(range(PANEL_ROWS)))
    with for_slice(builder, _ZERO, count, _n(PANEL_ROWS)) as (i, _):
        measured = _load(builder, distances, builder.mul(i, _n(4)), _VECTOR, 4)
        both = _keys_of(builder, measured, rows, builder.mul(i, _n(8)))
        last = builder.extract_element(builder.load(vectors[1]), ir.Constant(_I32, _HALF - 1))
        limit, bits = splat(builder, last, _HALF), []
        for half, half_keys in enumerate(both):
            builder.store(half_keys, _at(builder, here, _n(8 * _HALF * half), _KEYS)).align = 8
            near = builder.icmp_unsigned("<", half_keys, limit)
            bits.append(builder.zext(builder.bitcast(near, ir.IntType(_HALF)), _BITS))
        near = builder.or_(bits[0], builder.shl(bits[1], ir.Constant(_BITS, _HALF)))
        inside = builder.icmp_signed(
            "<", numbers, splat(builder, builder.sub(count, i), PANEL_ROWS)
        )
        builder.store(builder.and_(near, builder.bitcast(inside, _BITS)), bits_left)
        test, body, end_block = map(builder.append_basic_block, ("test", "insert", "done"))
        builder.branch(test)
        builder.position_at_end(test)
        near = builder.load(bits_left)
        builder.cbranch(builder.icmp_unsigned("!=", near, _NO_BITS), body, end_block)
        builder.position_at_end(body)
        place = builder.zext(builder.call(lowest, [near, ir.Constant(_BIT, 1)]), _I64)
        builder.store(builder.and_(near, builder.sub(near, ir.Constant(_BITS, 1))), bits_left)
        _insert(builder, vectors, _load(builder, here, builder.mul(place, _n(8)), _I64, 8))
        builder.branch(test)
        builder.position_at_end(end_block)


def _insert(builder: Any, vectors: list[Any], key: Any) -> None:
    """Emit the code that inserts a key into two ascending vectors and drops the last key."""
    low, high = map(builder.load, vectors)
    everywhere = splat(builder, key, _HALF)
    mask = ir.Constant(ir.VectorType(_I32, _HALF), [2 * _HALF - 1, *range(_HALF - 1)])
    before = [ir.Constant(_KEYS, [0] * _HALF), low]
    for half, (vector, left_vector) in enumerate(zip((low, high), before, strict=True)):
        moved = builder.shuffle_vector(vector, left_vector, mask)
        greater = builder.icmp_unsigned(">", moved, everywhere)
        from_left = builder.select(greater, moved, everywhere)
        smaller = builder.icmp_unsigned("<", vector, from_left)
        builder.store(builder.select(smaller, vector, from_left), vectors[half])
