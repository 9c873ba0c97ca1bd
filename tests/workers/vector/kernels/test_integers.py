"""Sums over integers, in every form that this processor has."""

from typing import Any

import numpy as np

from workers.vector.kernels import integers
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address

Array = np.ndarray[Any, Any]


def test_integer_sums_equal_plain_sums() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, 4_096).astype(np.uint8)
    query = random.integers(-255, 511, 4_096).astype(np.int16)
    for pairing in (None, *integers.PAIRINGS):
        for of_differences in (True, False):
            total = integers.sum_of(of_differences, pairing)

            @kernel
            def run(rows: Array, query: Array, total: Any = total) -> int:
                result: int = total(address(rows), address(query), len(rows))
                return result

            wide_rows, wide_query = rows.astype(np.int64), query.astype(np.int64)
            expected = (
                (wide_rows - wide_query) ** 2 if of_differences else wide_rows * wide_query
            ).sum()
            assert run(rows, query) == expected
