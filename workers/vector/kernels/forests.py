"""Disjoint sets as a forest of parent rows (union-find), for kernels."""

import numpy as np

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.jit import kernel

Row = int | np.int64


@kernel
def join(parent: Array, first: Row, second: Row) -> None:
    """Join the sets of two members; `parent` is int64, and a root is the smallest of its set.

    Paths are halved during the search of the roots.
    """
    while parent[first] != first:
        parent[first] = parent[parent[first]]
        first = parent[first]
    while parent[second] != second:
        parent[second] = parent[parent[second]]
        second = parent[second]
    if first < second:
        parent[second] = first
    else:
        parent[first] = second
