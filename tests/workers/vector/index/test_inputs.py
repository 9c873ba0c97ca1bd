"""Vectors on the way in: padded, normalised, and refused where no distance could be told."""

from typing import Any

import numpy as np
import pytest

from schemas.errors import InvalidVector, WrongDimension
from workers.vector.index.inputs import prepare
from workers.vector.kernels.metrics import Metric, Storage

WIDE = np.arange(1, 21, dtype=np.float32)


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("storage", Storage)
def test_prepare_pads_rows_with_zeros(metric: Metric, storage: Storage) -> None:
    for vectors, count in ((WIDE, 1), (np.stack([WIDE, -WIDE, 2 * WIDE]), 3)):
        rows = prepare(vectors, 20, metric, storage)
        assert rows.shape == (count, 32) and rows.dtype == storage.value
        assert not rows[:, 20:].any()
        expected = np.atleast_2d(vectors)
        if metric is Metric.COSINE:
            expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(rows[:, :20], expected, rtol=1e-3)


def test_prepare_keeps_zero_vector() -> None:
    assert not prepare(np.zeros((2, 20)), 20, Metric.COSINE).any()


@pytest.mark.parametrize(
    ("vectors", "metric", "error"),
    [
        (WIDE[:19], Metric.COSINE, WrongDimension),
        (WIDE.reshape(2, 10), Metric.SQEUCLIDEAN, WrongDimension),
        (np.zeros((1, 1, 20)), Metric.SQEUCLIDEAN, WrongDimension),
        (["x"] * 20, Metric.SQEUCLIDEAN, InvalidVector),
        ([*WIDE[:19], np.nan], Metric.COSINE, InvalidVector),
        ([*WIDE[:19], np.inf], Metric.SQEUCLIDEAN, InvalidVector),
        (WIDE * 1e19, Metric.INNER_PRODUCT, InvalidVector),
    ],
)
def test_prepare_rejects_vectors_without_distance(
    vectors: Any, metric: Metric, error: type[Exception]
) -> None:
    with pytest.raises(error, match="expected"):
        prepare(vectors, 20, metric)


def test_prepare_rejects_half_precision_overflow_except_by_cosine() -> None:
    with pytest.raises(InvalidVector, match="65504"):
        prepare(WIDE * 1e5, 20, Metric.SQEUCLIDEAN, Storage.FLOAT16)
    large = prepare(WIDE.astype(np.float64) * 1e18, 20, Metric.COSINE, Storage.FLOAT16)
    assert np.isfinite(large).all()
