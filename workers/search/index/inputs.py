"""What a metric means for vectors: checks of input, storage, and distances as they are shown.

Smaller is nearer: `inner_product` distances are negated products, `cosine` ones are 1 - cosine.
Cosine is the inner product of vectors that were normalised on the way in; a zero vector stays zero
and is at distance 1 of everything.
"""

from enum import StrEnum
from typing import Any

import numpy as np

from schemas.errors import InvalidVector, WrongDimension
from workers.search.kernels.distances import (
    HALF,
    INNER_PRODUCT,
    SINGLE,
    SQUARED_L2,
    distance,
    padded,
)
from workers.search.kernels.jit import kernel
from workers.search.kernels.memory import address

Array = np.ndarray[Any, Any]

LINE_BYTES = 64
_SQUARES_MAX = float(np.finfo(np.float32).max) / 4  # of a vector: then every distance is finite


class Metric(StrEnum):
    """How near two vectors are."""

    SQEUCLIDEAN = "sqeuclidean"
    INNER_PRODUCT = "inner_product"
    COSINE = "cosine"

    @property
    def kernel(self) -> int:
        """The metric as kernels know it."""
        return SQUARED_L2 if self is Metric.SQEUCLIDEAN else INNER_PRODUCT

    def shown(self, distances: Array) -> Array:
        """Distances of kernels as users see them, float32; perhaps the same array."""
        return distances + np.float32(1) if self is Metric.COSINE else distances


class Storage(StrEnum):
    """How vectors are kept. Distances are always computed in float32."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"

    @property
    def kernel(self) -> int:
        """The storage as kernels know it."""
        return HALF if self is Storage.FLOAT16 else SINGLE


def aligned(rows: int, columns: int, dtype: Any) -> Array:
    """An uninitialised matrix that begins at a cache line."""
    size = rows * columns * np.dtype(dtype).itemsize
    room = np.empty(size + LINE_BYTES, np.uint8)
    first = -room.ctypes.data % LINE_BYTES
    matrix: Array = room[first : first + size].view(dtype).reshape(rows, columns)
    return matrix


def numbers(vectors: Any) -> Array:
    """What was given, as float32; raises InvalidVector."""
    try:
        return np.asarray(vectors, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidVector(f"expected numbers in rows of one length: {error}") from error


def prepared(vectors: Any, dim: int, metric: Metric, storage: Storage = Storage.FLOAT32) -> Array:
    """Vectors as they are stored: shape (count, padded dim), aligned, zeros at the end of rows.

    `vectors` has shape (count, dim) or (dim,). Raises WrongDimension and InvalidVector.
    """
    given = numbers(vectors)
    if given.shape == (dim,) and metric is not Metric.COSINE and storage is Storage.FLOAT32:
        out = np.zeros((1, padded(dim)), np.float32)
        out[0, :dim] = given
        if _squares(out) <= _SQUARES_MAX:  # then all values are finite; the usual query
            return out
    if given.ndim == 1:
        given = given[None]
    if given.ndim != 2 or given.shape[1] != dim:
        raise WrongDimension(
            f"expected vectors of {dim} values, found shape {np.shape(vectors)}; "
            "use the model that the collection was built with"
        )
    squares = np.einsum("ij,ij->i", given, given)
    if not (squares <= _SQUARES_MAX).all():
        _check(given, squares, metric)
    shape = (len(given), padded(dim))
    out = np.empty(shape, storage.value) if len(given) == 1 else aligned(*shape, storage.value)
    out[:, dim:] = 0
    if metric is Metric.COSINE:
        norms = np.linalg.norm(given.astype(np.float64), axis=1, keepdims=True)
        given = (given / np.where(norms == 0, 1, norms)).astype(np.float32)
    with np.errstate(over="ignore"):
        out[:, :dim] = given
    if storage is Storage.FLOAT16 and not np.isfinite(out).all():
        raise InvalidVector("expected values within +-65504, found larger; store float32 instead")
    return out


def _check(given: Array, squares: Array, metric: Metric) -> None:
    """Raise InvalidVector; `squares` are sums over rows."""
    if not np.isfinite(given).all():
        row = int(np.flatnonzero(~np.isfinite(given).all(axis=1))[0])
        raise InvalidVector(f"expected finite values, found NaN or infinity in vector {row}")
    if metric is not Metric.COSINE:
        row = int(np.flatnonzero(~(squares <= _SQUARES_MAX))[0])
        raise InvalidVector(
            f"expected squares that sum to {_SQUARES_MAX:.2g} at most, so that distances are "
            f"finite, found more in vector {row}; scale the vectors, or use cosine"
        )


@kernel
def _squares(row: Array) -> Any:
    """Their sum over a matrix of one padded row."""
    at = address(row)
    return -distance(at, at, row.shape[1], INNER_PRODUCT, SINGLE)
