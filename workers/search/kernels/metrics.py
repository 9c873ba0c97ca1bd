"""How near two vectors are and how they are stored: names for people, numbers for kernels.

Smaller is nearer: `inner_product` distances are negated products, `cosine` ones are 1 - cosine.
Cosine is the inner product of vectors that were normalised on the way in (`index/inputs.py`).
Imports neither NumPy nor a compiler, so that settings may name metrics.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SQUARED_L2, INNER_PRODUCT = 0, 1  # metrics, as kernels know them
SINGLE, HALF = 0, 1  # how rows are stored; queries are always single


class Metric(StrEnum):
    """How near two vectors are."""

    SQEUCLIDEAN = "sqeuclidean"
    INNER_PRODUCT = "inner_product"
    COSINE = "cosine"

    @property
    def number(self) -> int:
        """The metric as kernels know it: SQUARED_L2 or INNER_PRODUCT."""
        return SQUARED_L2 if self is Metric.SQEUCLIDEAN else INNER_PRODUCT

    def to_user_distances(self, distances: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Distances of kernels as users see them, float32; perhaps the same array."""
        return distances + 1 if self is Metric.COSINE else distances


class Storage(StrEnum):
    """How vectors are kept. Distances are always computed in float32."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"

    @property
    def number(self) -> int:
        """The storage as kernels know it: SINGLE or HALF."""
        return HALF if self is Storage.FLOAT16 else SINGLE
