"""Emits LLVM code for vectors: one value in all places, and the sum of all places."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def splat(builder: Any, value: Any, places: int) -> Any:
    """Return a vector with one value in all places."""
    kind = ir.VectorType(value.type, places)
    lane = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I64, 0))
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(_I32, places), None))


def sum_lanes(builder: Any, vector: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Return the sum of a vector's values, as a fixed tree; `add` is a method of the builder."""
    values = vector.type.count
    while values > 1:
        values //= 2
        undefined, mask = ir.Constant(vector.type, ir.Undefined), ir.VectorType(_I32, values)
        low, high = (ir.Constant(mask, list(range(first, first + values))) for first in (0, values))
        vector = add(
            builder.shuffle_vector(vector, undefined, low),
            builder.shuffle_vector(vector, undefined, high),
        )
    return builder.extract_element(vector, ir.Constant(_I32, 0))
