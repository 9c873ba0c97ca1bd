"""Sums over codes of rows (uint8) and of queries (int16), as LLVM code.

Sums of integers are exact, so every form of them gives the same. x86 has an instruction that
multiplies 16-bit integers and adds pairs of products, which the compiler does not find by itself;
other processors take the plain form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir

from workers.search.kernels.jit import insert_function, intrinsic, types

SIMD_CODES = 64  # codes are padded to a multiple

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_vector: Callable[[Any, int], Any] = ir.VectorType


@dataclass(frozen=True, slots=True)
class Pairing:
    """An instruction that multiplies int16 and adds pairs of products."""

    feature: str
    values: int  # of int16
    name: str


PAIRINGS = [
    each
    for each in (
        Pairing("avx512bw", 32, "llvm.x86.avx512.pmaddw.d.512"),
        Pairing("avx2", 16, "llvm.x86.avx2.pmadd.wd"),
    )
    if binding.get_host_cpu_features().get(each.feature)
]
_PLAIN_VALUES = 16


def _products(builder: Any, left: Any, right: Any, pairing: Pairing | None) -> Any:
    """Products of all values, 32 bits each, or sums of pairs of them."""
    if pairing is not None:
        kind = ir.FunctionType(_vector(_I32, pairing.values // 2), [left.type, right.type])
        function = insert_function(builder.module, kind, pairing.name)
        return builder.call(function, [left, right])
    wide = _vector(_I32, _PLAIN_VALUES)
    return builder.mul(builder.sext(left, wide), builder.sext(right, wide))


def sum_of(of_differences: bool, pairing: Pairing | None) -> Any:
    """An intrinsic: (address of codes, address of a coded query, padded length) -> int32.

    The sum of squared differences, or of products; the padded length is a multiple of
    `SIMD_CODES`.
    """

    @intrinsic
    def total(context: Any, codes: Any, query: Any, length: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            addresses_and_length: list[Any] = arguments
            return _loop(builder, *addresses_and_length, pairing=pairing, differs=of_differences)

        return types.int32(types.intp, types.intp, types.intp), generate

    return total


def _loop(
    builder: Any, codes: Any, query: Any, length: Any, *, pairing: Pairing | None, differs: bool
) -> Any:
    """Whole `SIMD_CODES` at a time, several independent sums."""
    values = pairing.values if pairing is not None else _PLAIN_VALUES
    parts = SIMD_CODES // values
    held = _vector(_I32, values // 2 if pairing is not None else values)
    entry = builder.block
    again, done = builder.append_basic_block("again"), builder.append_basic_block("done")
    builder.branch(again)
    builder.position_at_end(again)
    i = builder.phi(_I64)
    i.add_incoming(ir.Constant(_I64, 0), entry)
    sums = [builder.phi(held) for _ in range(parts)]
    after = []
    for part, total in enumerate(sums):
        at = builder.add(i, ir.Constant(_I64, part * values))
        place = builder.inttoptr(builder.add(codes, at), _vector(_I8, values).as_pointer())
        row = builder.zext(builder.load(place, align=1), _vector(_I16, values))
        twice = builder.add(query, builder.add(at, at))
        place = builder.inttoptr(twice, _vector(_I16, values).as_pointer())
        other = builder.load(place, align=1)
        if differs:
            row = other = builder.sub(row, other)
        after.append(builder.add(total, _products(builder, row, other, pairing)))
        total.add_incoming(ir.Constant(held, [0] * held.count), entry)
        total.add_incoming(after[-1], again)
    following = builder.add(i, ir.Constant(_I64, SIMD_CODES))
    i.add_incoming(following, again)
    builder.cbranch(builder.icmp_signed("<", following, length), again, done)
    builder.position_at_end(done)
    while len(after) > 1:
        after = [builder.add(*pair) for pair in zip(after[::2], after[1::2], strict=True)]
    return _across(builder, after[0], held.count)


def _across(builder: Any, vector: Any, values: int) -> Any:
    while values > 1:
        values //= 2
        undefined, mask = ir.Constant(vector.type, ir.Undefined), _vector(_I32, values)
        halves = [
            builder.shuffle_vector(
                vector, undefined, ir.Constant(mask, list(range(first, first + values)))
            )
            for first in (0, values)
        ]
        vector = builder.add(*halves)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


_BEST = PAIRINGS[0] if PAIRINGS else None
square_sum, product_sum = sum_of(True, _BEST), sum_of(False, _BEST)
