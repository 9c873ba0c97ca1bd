"""Metrics and storages of vectors: names for users, numbers for kernels.

Smaller is nearer: `inner_product` distances are negated products, `cosine` ones are 1 - cosine.
Cosine is the inner product of vectors that `index/inputs.py` has normalised. This file imports
neither NumPy nor a compiler, so that settings may name metrics.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SQUARED_L2, INNER_PRODUCT = 0, 1  # metrics of kernels
SINGLE, HALF = 0, 1  # storages of rows, float32 and float16; queries are always SINGLE


class Metric(StrEnum):
    """The metric of distances between vectors."""

    SQEUCLIDEAN = "sqeuclidean"
    INNER_PRODUCT = "inner_product"
    COSINE = "cosine"

    @property
    def number(self) -> int:
        """Return the kernels' number of the metric: SQUARED_L2 or INNER_PRODUCT."""
        return SQUARED_L2 if self is Metric.SQEUCLIDEAN else INNER_PRODUCT

    def to_user_distances(self, distances: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Convert kernels' distances to those that users get, float32; may be the same array."""
        return distances + 1 if self is Metric.COSINE else distances


class Storage(StrEnum):
    """The number format of stored vectors. Distances are always computed in float32."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"

    @property
    def number(self) -> int:
        """Return the kernels' number of the storage: SINGLE or HALF."""
        return HALF if self is Storage.FLOAT16 else SINGLE
