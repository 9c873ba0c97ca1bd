"""Checks and pads vectors from callers, and normalises them if the metric is cosine.

A zero vector stays zero; by cosine its distance from every vector is 1.
"""

from typing import Any

import numpy as np

from schemas.errors import InvalidVector, WrongDimension
from workers.vector.kernels.arrays import Array, aligned
from workers.vector.kernels.distances import distance, padded_dim
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import INNER_PRODUCT, SINGLE, Metric, Storage
from workers.vector.limits import SQUARES_MAX


def to_float32(vectors: Any) -> Array:
    """Convert vectors to float32; raises InvalidVector."""
    try:
        return np.asarray(vectors, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidVector(f"expected numbers in rows of one length: {error}") from error


def prepare(vectors: Any, dim: int, metric: Metric, storage: Storage = Storage.FLOAT32) -> Array:
    """Return vectors as they are stored: (count, padded dim), rows end with zeros.

    `vectors` has shape (count, dim) or (dim,). Several vectors are aligned to a cache line. Raises
    WrongDimension and InvalidVector.
    """
    matrix = to_float32(vectors)
    if matrix.shape == (dim,) and metric is not Metric.COSINE and storage is Storage.FLOAT32:
        out = np.zeros((1, padded_dim(dim)), np.float32)
        out[0, :dim] = matrix
        if _squares(out) <= SQUARES_MAX:  # then all values are finite; fast path of most queries
            return out
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or matrix.shape[1] != dim:
        raise WrongDimension(
            f"expected vectors of {dim} values, found shape {np.shape(vectors)}; "
            "use the model that the collection was built with"
        )
    squares = np.einsum("ij,ij->i", matrix, matrix)
    if not (squares <= SQUARES_MAX).all():
        _check(matrix, squares, metric)
    shape = (len(matrix), padded_dim(dim))
    out = np.empty(shape, storage.value) if len(matrix) == 1 else aligned(*shape, storage.value)
    out[:, dim:] = 0
    if metric is Metric.COSINE:
        norms = np.linalg.norm(matrix.astype(np.float64), axis=1, keepdims=True)
        matrix = (matrix / np.where(norms == 0, 1, norms)).astype(np.float32)
    with np.errstate(over="ignore"):
        out[:, :dim] = matrix
    if storage is Storage.FLOAT16 and not np.isfinite(out).all():
        raise InvalidVector("expected values within +-65504, found larger; store float32 instead")
    return out


def _check(matrix: Array, squares: Array, metric: Metric) -> None:
    """Raise InvalidVector for bad values; `squares` are the sums of squares of rows."""
    if not np.isfinite(matrix).all():
        row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
        raise InvalidVector(f"expected finite values, found NaN or infinity in vector {row}")
    if metric is not Metric.COSINE:
        row = int(np.flatnonzero(~(squares <= SQUARES_MAX))[0])
        raise InvalidVector(
            f"expected squares that sum to {SQUARES_MAX:.2g} at most, so that distances are "
            f"finite, found more in vector {row}; scale the vectors, or use cosine"
        )


@kernel
def _squares(row: Array) -> Any:
    """Return the sum of squares of a matrix of one padded row, float32 (1, padded dim)."""
    at = address(row)
    return -distance(at, at, row.shape[1], INNER_PRODUCT, SINGLE)
