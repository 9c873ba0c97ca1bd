"""Sums over codes of rows (uint8) and of queries (int16), as LLVM code.

Sums of integers are exact, so all forms of the code return the same value. x86 has an instruction
that multiplies 16-bit integers and adds pairs of products, which the compiler does not select by
itself; other processors use plain code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir

from workers.vector.kernels.jit import emitted, for_slice, insert_function, types, variable
from workers.vector.kernels.vectors import sum_lanes

SIMD_CODES = 64  # codes are padded to a multiple of it

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ZERO = ir.Constant(_I64, 0)
_vector: Callable[[Any, int], Any] = ir.VectorType


@dataclass(frozen=True, slots=True)
class Pairing:
    """An instruction that multiplies int16 and adds pairs of products."""

    feature: str
    values: int  # of int16
    name: str


PAIRINGS = [
    pairing
    for pairing in (
        Pairing("avx512bw", 32, "llvm.x86.avx512.pmaddw.d.512"),
        Pairing("avx2", 16, "llvm.x86.avx2.pmadd.wd"),
    )
    if binding.get_host_cpu_features().get(pairing.feature)
]
_PLAIN_VALUES = 16


def _products(builder: Any, lhs: Any, rhs: Any, pairing: Pairing | None) -> Any:
    """Emit the code of the products of all values, 32 bits each, or of sums of pairs of them."""
    if pairing is not None:
        kind = ir.FunctionType(_vector(_I32, pairing.values // 2), [lhs.type, rhs.type])
        function = insert_function(builder.module, kind, pairing.name)
        return builder.call(function, [lhs, rhs])
    wide = _vector(_I32, _PLAIN_VALUES)
    return builder.mul(builder.sext(lhs, wide), builder.sext(rhs, wide))


def sum_of(of_differences: bool, pairing: Pairing | None) -> Any:
    """Make a kernel function: (address of codes, of a coded query, padded length) -> int32.

    It returns the sum of squared differences, or of products. The padded length is a multiple of
    `SIMD_CODES`; that many values are added at a time, to several independent sums.
    """
    values = pairing.values if pairing is not None else _PLAIN_VALUES
    sum_type = _vector(_I32, values // 2 if pairing is not None else values)

    @emitted(types.int32, types.intp, types.intp, types.intp)
    def total(builder: Any, codes: Any, query: Any, length: Any) -> Any:
        sums = [variable(builder, ir.Constant(sum_type, [0] * sum_type.count))
                for _ in range(SIMD_CODES // values)]  # fmt: skip
        with for_slice(builder, _ZERO, length, ir.Constant(_I64, SIMD_CODES)) as (at, _):
            for part in sums:
                place = builder.inttoptr(builder.add(codes, at), _vector(_I8, values).as_pointer())
                row = builder.zext(builder.load(place, align=1), _vector(_I16, values))
                twice = builder.add(query, builder.add(at, at))
                place = builder.inttoptr(twice, _vector(_I16, values).as_pointer())
                query_part = builder.load(place, align=1)
                if of_differences:
                    row = query_part = builder.sub(row, query_part)
                added = _products(builder, row, query_part, pairing)
                builder.store(builder.add(builder.load(part), added), part)
                at = builder.add(at, ir.Constant(_I64, values))
        totals = [builder.load(part) for part in sums]
        while len(totals) > 1:
            totals = [builder.add(*pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
        return sum_lanes(builder, totals[0], builder.add)

    return total


_BEST = PAIRINGS[0] if PAIRINGS else None
square_sum, product_sum = sum_of(True, _BEST), sum_of(False, _BEST)
