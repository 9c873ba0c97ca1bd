"""Vectors on the way in: padded, normalised, and refused where no distance could be told."""

from typing import Any

import numpy as np
import pytest

from schemas.errors import InvalidVector, WrongDimension
from workers.search.index.inputs import prepare
from workers.search.kernels.metrics import Metric, Storage

WIDE = np.arange(1, 21, dtype=np.float32)


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("storage", Storage)
def test_rows_are_padded_with_zeros(metric: Metric, storage: Storage) -> None:
    for given, count in ((WIDE, 1), (np.stack([WIDE, -WIDE, 2 * WIDE]), 3)):
        found = prepare(given, 20, metric, storage)
        assert found.shape == (count, 32) and found.dtype == storage.value
        assert not found[:, 20:].any()
        wanted = np.atleast_2d(given)
        if metric is Metric.COSINE:
            wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
        assert np.allclose(found[:, :20], wanted, rtol=1e-3)


def test_a_zero_vector_stays_zero() -> None:
    assert not prepare(np.zeros((2, 20)), 20, Metric.COSINE).any()


@pytest.mark.parametrize(
    ("given", "metric", "error"),
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
def test_what_has_no_distance_is_refused(
    given: Any, metric: Metric, error: type[Exception]
) -> None:
    with pytest.raises(error, match="expected"):
        prepare(given, 20, metric)


def test_what_half_precision_cannot_hold_is_refused_and_large_directions_are_not() -> None:
    with pytest.raises(InvalidVector, match="65504"):
        prepare(WIDE * 1e5, 20, Metric.SQEUCLIDEAN, Storage.FLOAT16)
    large = prepare(WIDE.astype(np.float64) * 1e18, 20, Metric.COSINE, Storage.FLOAT16)
    assert np.isfinite(large).all()
