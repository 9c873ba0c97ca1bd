"""Inserting into ascending lists of 64-bit keys at addresses, as LLVM code: whole vectors.

A search inserts hundreds of times into a list of some 64 keys. Where a key goes cannot be
predicted, so the place is counted over all of the list, and what comes after it moves by masked
loads and stores; loops over single keys would spend their time on mispredicted branches.
"""

from typing import Any

from llvmlite import ir

from workers.search.kernels.jit import insert_function, intrinsic, types

_KEYS = 8  # of a vector
_BIT, _I8, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)
_VECTOR, _MASK = ir.VectorType(_I64, _KEYS), ir.VectorType(_BIT, _KEYS)
_NUMBERS = ir.Constant(_VECTOR, list(range(_KEYS)))
_ALIGNED = ir.Constant(ir.IntType(32), 8)


def _every(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I64, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), _KEYS), None))


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


@intrinsic
def count_below(context: Any, keys: Any, count: Any, key: Any) -> Any:
    """How many of `count` keys at an address come before `key`; lowest bits do not count."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        keys, count, key = arguments
        entry, wanted = builder.block, _every(builder, key)
        counts = _every(builder, count)
        again, done = builder.append_basic_block("again"), builder.append_basic_block("done")
        builder.branch(again)
        builder.position_at_end(again)
        i, below = builder.phi(_I64), builder.phi(_I64)
        inside = builder.icmp_signed("<", builder.add(_NUMBERS, _every(builder, i)), counts)
        last = ir.Constant(_VECTOR, [-1] * _KEYS)
        held = _masked_load(builder, _place(builder, keys, i), inside, last)
        held = builder.and_(held, ir.Constant(_VECTOR, [-2] * _KEYS))
        bits = builder.bitcast(builder.icmp_unsigned("<", held, wanted), _I8)
        more = builder.add(below, builder.zext(builder.ctpop(bits), _I64))
        following = builder.add(i, ir.Constant(_I64, _KEYS))
        for phi, value in ((i, following), (below, more)):
            phi.add_incoming(ir.Constant(_I64, 0), entry)
            phi.add_incoming(value, again)
        builder.cbranch(builder.icmp_signed("<", following, count), again, done)
        builder.position_at_end(done)
        return more

    return types.int64(types.intp, types.intp, types.uint64), generate


@intrinsic
def move_up(context: Any, keys: Any, count: Any, first: Any) -> Any:
    """Move keys at an address one place up from `first` on; the last of `count` is lost."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        keys, count, first = arguments
        entry = builder.block
        counts, firsts = _every(builder, count), _every(builder, first)
        again, done = builder.append_basic_block("again"), builder.append_basic_block("done")
        whole = ir.Constant(_I64, -_KEYS)
        start = builder.and_(builder.sub(count, ir.Constant(_I64, 1)), whole)
        builder.branch(again)
        builder.position_at_end(again)
        i = builder.phi(_I64)
        places = builder.add(_NUMBERS, _every(builder, i))
        inside = builder.and_(
            builder.icmp_signed("<", places, counts), builder.icmp_signed(">", places, firsts)
        )
        to = _place(builder, keys, i)
        source = builder.sub(to, ir.Constant(_I64, 8))
        held = _masked_load(builder, source, inside, ir.Constant(_VECTOR, ir.Undefined))
        _masked_store(builder, held, to, inside)
        following = builder.add(i, whole)
        i.add_incoming(start, entry)
        i.add_incoming(following, again)
        builder.cbranch(builder.icmp_signed(">", i, first), again, done)
        builder.position_at_end(done)
        return _context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate
