"""Computes exact neighbours and recall in float64, with ties counted as right."""

import numpy as np

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import Metric

_BLOCK = 128
_CLOSE = 1e-5  # relative difference of distances that float32 cannot distinguish


def farthest(vectors: Array, queries: Array, k: int, metric: Metric) -> Array:
    """Return the distance of each query's k-th nearest row, float64 (queries,)."""
    rows, spare = _ready(vectors, metric), min(len(vectors), k + 16)
    norms = np.einsum("ij,ij->i", rows, rows)
    out = np.empty(len(queries))
    for first in range(0, len(queries), _BLOCK):
        block = _ready(queries[first : first + _BLOCK], metric)
        scores = -(block @ rows.T)
        if metric is Metric.SQEUCLIDEAN:
            scores = 2 * scores + norms
        near = np.argpartition(scores, spare - 1, axis=1)[:, :spare]
        for i, row_ids in enumerate(near):
            out[first + i] = np.sort(_distances(rows[row_ids], block[i], metric))[k - 1]
    return out


def recall(vectors: Array, queries: Array, results: Array, limits: Array, metric: Metric) -> float:
    """Return the share of `results` rows, shape (queries, k), that are no farther than the k-th
    nearest row, at distance `limits`; rows of -1 and duplicates do not count."""
    hits = 0
    for query, rows, limit in zip(_ready(queries, metric), results, limits, strict=True):
        near = np.unique(rows[rows >= 0])
        distances = _distances(_ready(vectors[near], metric), query, metric)
        hits += int((distances <= limit + _CLOSE * abs(limit) + 1e-12).sum())
    return hits / results.size


def _ready(vectors: Array, metric: Metric) -> Array:
    exact = vectors.astype(np.float64)
    if metric is Metric.COSINE:
        norms = np.linalg.norm(exact, axis=1, keepdims=True)
        exact /= np.where(norms == 0, 1, norms)
    return exact


def _distances(rows: Array, query: Array, metric: Metric) -> Array:
    if metric is Metric.SQEUCLIDEAN:
        squares: Array = ((rows - query) ** 2).sum(1)
        return squares
    products: Array = -(rows @ query)
    return products
