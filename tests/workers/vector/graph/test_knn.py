"""Lists of nearest neighbours."""

from typing import Any

import numpy as np

from tests.workers.vector.data import neighbour_lists, overlapping, recall
from workers.vector.kernels.keys import rows_and_distances
from workers.vector.kernels.metrics import Metric


def share_found(keys: Any, scores: Any, some: Any) -> float:
    """Of the nearest other rows of some rows, by scores of shape (some rows, rows)."""
    scores[np.arange(len(some)), some] = np.inf
    truth = np.argsort(scores, axis=1)[:, : keys.shape[1]]
    return recall(rows_and_distances(keys[some])[0], truth)


def test_neighbour_lists_are_exact_for_few_rows_and_close_for_many() -> None:
    for rows, floor in ((700, 1.0), (13_000, 0.8)):
        vectors, _ = overlapping(rows, 0, dim=12)
        some = np.arange(0, rows, rows // 100)
        scores = ((vectors[some, None] - vectors[None]) ** 2).sum(2) if rows < 1_000 else None
        if scores is None:
            norms = np.einsum("ij,ij->i", vectors, vectors)
            scores = norms - 2 * (vectors[some] @ vectors.T)
        assert share_found(neighbour_lists(vectors), scores, some) >= floor


def test_neighbour_lists_depend_on_seed_and_rows_only() -> None:
    vectors, _ = overlapping(13_000, 0, dim=8)
    first, second, other_seed = (neighbour_lists(vectors, seed=seed) for seed in (1, 1, 2))
    assert first.tobytes() == second.tobytes()
    assert first.tobytes() != other_seed.tobytes()


def test_neighbour_lists_find_long_rows_by_inner_product() -> None:
    """By inner product the longest are nearest to nearly all here; few rounds lead to them."""
    random = np.random.default_rng(3)
    vectors = (random.normal(size=(13_000, 24)) + 3) * np.exp(random.normal(size=(13_000, 1)))
    vectors = vectors.astype(np.float32)
    some = np.arange(0, len(vectors), 100)
    keys = neighbour_lists(vectors, count=48, metric=Metric.INNER_PRODUCT)
    assert share_found(keys, -vectors[some] @ vectors.T, some) >= 0.9
