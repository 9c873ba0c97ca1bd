"""Arrays as kernels want them."""

import numpy as np

from workers.search.kernels.arrays import packed, unpacked


def test_bit_sets() -> None:
    for count in (0, 1, 31, 32, 33, 100):
        mask = np.random.default_rng(count).random(count) < 0.5
        assert unpacked(packed(mask), count).tolist() == mask.tolist()
