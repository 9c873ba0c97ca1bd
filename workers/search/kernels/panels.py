"""Rows in panels: distances of sixteen at a time, and the nearest of many, as LLVM code.

In a *panel* rows stand side by side, one dimension after the other. So one instruction serves one
dimension of all of its rows, and no sum across a vector is left at the end. The sums are those of
`distances.py`, addend by addend, so that a distance is the same to the bit, wherever it comes from.

The nearest are kept in two vectors while all panels are looked at, as sorted keys. A key goes to
its place without a branch: each place takes the greater of the key and its left neighbour, unless
what it has is smaller.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from workers.search.kernels.arrays import Array
from workers.search.kernels.distances import SIMD_FLOATS, UNROLLED
from workers.search.kernels.jit import (
    emitted,
    for_slice,
    insert_function,
    kernel,
    types,
    variable,
)
from workers.search.kernels.metrics import INNER_PRODUCT, SQUARED_L2
from workers.search.kernels.vectors import splat

PANEL_ROWS = SIMD_FLOATS
PANEL_DIM_MAX = 64  # of longer rows, codes are as fast
NEAREST_MAX = 16  # that are kept in vectors
_HALF, _STEP = NEAREST_MAX // 2, 8

_BIT, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _WORDS = ir.VectorType(_F32, PANEL_ROWS), ir.VectorType(_I32, PANEL_ROWS)
_KEYS = ir.VectorType(_I64, _HALF)
_BITS = ir.IntType(PANEL_ROWS)
_NO_BITS = ir.Constant(_BITS, 0)
_ZERO, _ZEROS = ir.Constant(_I64, 0), ir.Constant(_VECTOR, [0.0] * PANEL_ROWS)
_PANEL = 4 * PANEL_ROWS  # bytes of one dimension


def panels(vectors: Array, dim: int) -> Array:
    """Rows of `vectors`, shape (rows, padded dim), as float32 (panels, panel dim, PANEL_ROWS).

    The last panel is filled up with zeros. Dimensions stand in the order in which they are needed:
    those that are in the same place of a vector follow each other. `dim` are not padding.
    """
    rows = len(vectors)
    whole = np.zeros((-(-rows // PANEL_ROWS) * PANEL_ROWS, panel_dim(dim)), np.float32)
    whole[:rows] = vectors[:, : whole.shape[1]]
    by_dimension = whole.reshape(-1, PANEL_ROWS, whole.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(by_dimension[:, _order(whole.shape[1])])


def panel_dim(dim: int) -> int:
    """Dimensions of a panel: in steps of a few, each of which has code of its own."""
    return -(-dim // _STEP) * _STEP


def _order(dims: int) -> list[int]:
    """In which the dimensions of a panel are added up."""
    return [d for place in range(SIMD_FLOATS) for d in range(place, dims, SIMD_FLOATS)]


def pad_to_panel(rows: Array) -> Array:
    """The same rows, int64, with memory behind them to read the last panel's whole."""
    out = np.zeros(-(-len(rows) // PANEL_ROWS) * PANEL_ROWS, np.int64)
    out[: len(rows)] = rows
    return out[: len(rows)]


def _n(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """What an address and an offset point to."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def _load(builder: Any, base: Any, offset: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(_at(builder, base, offset, kind))
    loaded.align = align
    return loaded


def _term(builder: Any, panel: Any, query: Any, metric: int) -> Callable[[Any, Any, Any], Any]:
    """Code that adds the terms of one dimension, of all rows, to their sums.

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
    """Code of the distances of a panel's rows, of so many dimensions, in `distances.py`'s order.

    There dimension d is in place d % SIMD_FLOATS of a vector, vectors are added to one of several
    sums in turn if they are as many, else to the first, and the places to each other as a tree.
    What is left out here is zero there.
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
    """Distances as unsigned words in the same order, as in `keys.py`."""
    bits = builder.bitcast(builder.fadd(distances, _ZEROS), _WORDS)
    sign = builder.ashr(bits, ir.Constant(_WORDS, [31] * PANEL_ROWS))
    return builder.xor(bits, builder.or_(sign, ir.Constant(_WORDS, [0x80000000] * PANEL_ROWS)))


@emitted(
    types.void, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp
)  # fmt: skip
def _measure(
    builder: Any, panels: Any, count: Any, query: Any, dims: Any, metric: Any, out: Any
) -> None:
    """Code of `measure`: a loop of its own for each size of a panel and each metric."""
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
    """Distances of the rows of `count` panels to a query, all at addresses, as `distance` has them.

    `panels` are float32 (count, dims, PANEL_ROWS), the query is float32, at least (dims,), and
    `out` gets float32 (count, PANEL_ROWS). `dims` are those of `panels`, `metric` of `metrics.py`.
    """
    _measure(panels, count, query, dims, metric, out)


@emitted(types.uint32, types.intp, types.float32)
def within(builder: Any, distances: Any, limit: Any) -> Any:
    """A bit for each of a panel's distances, at an address, that is no more than the limit."""
    near = builder.fcmp_ordered(
        "<=", _load(builder, distances, _ZERO, _VECTOR, 4), splat(builder, limit, PANEL_ROWS)
    )
    return builder.zext(builder.bitcast(near, _BITS), _I32)


def _keys_of(builder: Any, distances: Any, rows: Any, offset: Any) -> list[Any]:
    """Keys of a panel's distances and of rows, int64 at an address: two vectors."""
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
    """Keep the nearest of `count` rows in a list of `room` keys, at most NEAREST_MAX.

    Addresses: of distances, float32, and rows, int64, both filled up to whole panels, and of the
    list, uint64, ascending, in which none of the rows is.
    """
    free = builder.sub(_n(NEAREST_MAX), size)  # places before the list, which ends with the vectors
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
    """Code that puts what is near into two vectors, panel by panel."""
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
    """Put a key into two vectors that ascend; the last one falls out."""
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
