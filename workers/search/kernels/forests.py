"""Disjoint sets as a forest of parents (union-find), for kernels."""

import numpy as np

from workers.search.kernels.arrays import Array
from workers.search.kernels.jit import kernel

Row = int | np.int64


@kernel
def join(parent: Array, one: Row, two: Row) -> None:
    """Put the sets of two members together; `parent` is int64, and a root the smallest of its set.

    Paths are halved on the way.
    """
    while parent[one] != one:
        parent[one] = parent[parent[one]]
        one = parent[one]
    while parent[two] != two:
        parent[two] = parent[parent[two]]
        two = parent[two]
    if one < two:
        parent[two] = one
    else:
        parent[one] = two
