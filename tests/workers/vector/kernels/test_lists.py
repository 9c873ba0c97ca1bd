"""Inserting into lists at addresses, beside what a list does."""

from typing import Any

import numpy as np
import pytest

from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import EMPTY, FLAG, insert
from workers.vector.kernels.memory import address

Array = np.ndarray[Any, Any]


@kernel
def _insert(keys: Array, first: int, count: int, key: int) -> int:
    return insert(address(keys) + 8 * first, count, np.uint64(key))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 48, 63, 64, 65, 100, 512])
def test_insert_equals_insertion_into_list(count: int) -> None:
    """Nothing is written beside the list; flags stay with their keys."""
    random = np.random.default_rng(count)
    for turn in range(40):
        keys = random.integers(0, 2**60, count + 20).astype(np.uint64)
        list_keys = np.unique(2 * random.permutation(8 * count + 40)[:count])
        keys[5 : 5 + count] = EMPTY if turn == 0 else list_keys | random.integers(0, 2, count)
        key = 2 * int(random.integers(0, 8 * count + 44))
        listed = keys[5 : 5 + count].tolist()
        places = [listed_key & ~int(FLAG) for listed_key in listed]
        expected = keys.copy()
        place = -1
        if key < places[-1] and key not in places:
            place = sum(listed_key < key for listed_key in places)
            expected[5 : 5 + count] = [*listed[:place], key, *listed[place:-1]]
        assert _insert(keys, 5, count, key) == place
        assert (keys == expected).all()
