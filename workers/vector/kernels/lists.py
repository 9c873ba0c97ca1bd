"""Inserts keys into ascending lists of 64-bit keys at addresses, with vectors, as LLVM code.

A search inserts hundreds of times into a list of some 64 keys. The place of a key cannot be
predicted, so it is counted over the whole list, and the keys behind it move by masked loads and
stores. Loops over single keys would spend their time on mispredicted branches.
"""

from typing import Any

from llvmlite import ir

from workers.vector.kernels.jit import emitted, for_slice, insert_function, types, variable
from workers.vector.kernels.vectors import splat

_KEYS = 8  # of a vector
_BIT, _I8, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)
_VECTOR, _MASK = ir.VectorType(_I64, _KEYS), ir.VectorType(_BIT, _KEYS)
_NUMBERS = ir.Constant(_VECTOR, list(range(_KEYS)))
_ALIGNED, _ZERO = ir.Constant(ir.IntType(32), 8), ir.Constant(_I64, 0)


def _splat(builder: Any, value: Any) -> Any:
    return splat(builder, value, _KEYS)


def _masked_load(builder: Any, place: Any, mask: Any, otherwise: Any) -> Any:
    pointer = _VECTOR.as_pointer()
    kind = ir.FunctionType(_VECTOR, [pointer, ir.IntType(32), _MASK, _VECTOR])
    function = insert_function(builder.module, kind, "llvm.masked.load.v8i64.p0")
    return builder.call(function, [builder.inttoptr(place, pointer), _ALIGNED, mask, otherwise])


def _masked_store(builder: Any, value: Any, place: Any, mask: Any) -> None:
    pointer = _VECTOR.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [_VECTOR, pointer, ir.IntType(32), _MASK])
    function = insert_function(builder.module, kind, "llvm.masked.store.v8i64.p0")
    builder.call(function, [value, builder.inttoptr(place, pointer), _ALIGNED, mask])


def _place(builder: Any, keys: Any, i: Any) -> Any:
    return builder.add(keys, builder.shl(i, ir.Constant(_I64, 3)))


@emitted(types.int64, types.intp, types.intp, types.uint64)
def count_below(builder: Any, keys: Any, count: Any, key: Any) -> Any:
    """Return how many of `count` keys at an address are less than `key`, without lowest bits."""
    key_vector, counts = _splat(builder, key), _splat(builder, count)
    below = variable(builder, _ZERO)
    with for_slice(builder, _ZERO, count, ir.Constant(_I64, _KEYS)) as (i, _):
        inside = builder.icmp_signed("<", builder.add(_NUMBERS, _splat(builder, i)), counts)
        last = ir.Constant(_VECTOR, [-1] * _KEYS)
        values = _masked_load(builder, _place(builder, keys, i), inside, last)
        values = builder.and_(values, ir.Constant(_VECTOR, [-2] * _KEYS))
        bits = builder.bitcast(builder.icmp_unsigned("<", values, key_vector), _I8)
        bit_count = builder.zext(builder.ctpop(bits), _I64)
        builder.store(builder.add(builder.load(below), bit_count), below)
    return builder.load(below)


@emitted(types.void, types.intp, types.intp, types.intp)
def move_up(builder: Any, keys: Any, count: Any, first: Any) -> None:
    """Move keys at an address one place up from `first` on; the last of `count` is dropped."""
    counts, firsts = _splat(builder, count), _splat(builder, first)
    whole = ir.Constant(_I64, -_KEYS)
    start = builder.and_(builder.sub(count, ir.Constant(_I64, 1)), whole)
    before = builder.sub(first, ir.Constant(_I64, _KEYS))
    with for_slice(builder, start, before, whole, inc=False) as (i, _):
        places = builder.add(_NUMBERS, _splat(builder, i))
        inside = builder.and_(
            builder.icmp_signed("<", places, counts), builder.icmp_signed(">", places, firsts)
        )
        to = _place(builder, keys, i)
        source = builder.sub(to, ir.Constant(_I64, 8))
        values = _masked_load(builder, source, inside, ir.Constant(_VECTOR, ir.Undefined))
        _masked_store(builder, values, to, inside)
