"""Arrays as kernels want them."""

import numpy as np

from workers.vector.kernels.arrays import (
    aligned,
    are_in,
    first_bits,
    grow,
    members,
    pack_bits,
    unpack_bits,
)


def test_bit_sets_round_trip_masks() -> None:
    for count in (0, 1, 31, 32, 33, 100):
        mask = np.random.default_rng(count).random(count) < 0.5
        assert unpack_bits(pack_bits(mask), count).tolist() == mask.tolist()
        assert members(pack_bits(mask)).tolist() == np.flatnonzero(mask).tolist()
        rows = np.arange(count)[::-3]
        assert are_in(pack_bits(mask), rows).tolist() == mask[rows].tolist()
        for first in range(0, count, 7):
            assert first_bits(pack_bits(mask), first).tolist() == pack_bits(mask[:first]).tolist()


def test_grow_extends_matrix_in_place_where_memory_allows() -> None:
    """Arrays that share its memory keep their rows."""
    first = aligned(10, 32, np.uint8)
    first[:] = 1
    second = grow(first, 13)
    assert not np.shares_memory(first, second) and (second[:10] == 1).all()
    second[10:] = 2
    third = grow(second, 17)
    third[13:] = 3
    assert np.shares_memory(second, third)
    assert second[:, 0].tolist() == [1] * 10 + [2] * 3
    assert third[:, 0].tolist() == [1] * 10 + [2] * 3 + [3] * 4
    beyond = grow(third, 22)  # wherever the memory begins in its first line
    assert not np.shares_memory(third, beyond) and (beyond[:17] == third).all()
