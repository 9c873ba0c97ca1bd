"""Lists of nearest neighbours."""

from typing import Any

import numpy as np

from tests.workers.search.data import neighbour_lists, overlapping, recall
from workers.search.kernels.keys import rows_and_distances
from workers.search.kernels.metrics import Metric


def share_found(found: Any, scores: Any, some: Any) -> float:
    """Of the nearest other rows of some rows, by scores of shape (some rows, rows)."""
    scores[np.arange(len(some)), some] = np.inf
    truth = np.argsort(scores, axis=1)[:, : found.shape[1]]
    return recall(rows_and_distances(found[some])[0], truth)


def test_neighbours_of_few_rows_are_exact_and_of_many_nearly() -> None:
    for rows, floor in ((700, 1.0), (13_000, 0.8)):
        vectors, _ = overlapping(rows, 0, dim=12)
        some = np.arange(0, rows, rows // 100)
        scores = ((vectors[some, None] - vectors[None]) ** 2).sum(2) if rows < 1_000 else None
        if scores is None:
            norms = np.einsum("ij,ij->i", vectors, vectors)
            scores = norms - 2 * (vectors[some] @ vectors.T)
        assert share_found(neighbour_lists(vectors), scores, some) >= floor


def test_a_seed_and_the_rows_decide_everything() -> None:
    vectors, _ = overlapping(13_000, 0, dim=8)
    first, again, other = (neighbour_lists(vectors, seed=seed) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_rows_that_are_near_by_their_length_alone_are_found() -> None:
    """By inner product the longest are nearest to nearly all here; few rounds lead to them."""
    random = np.random.default_rng(3)
    vectors = (random.normal(size=(13_000, 24)) + 3) * np.exp(random.normal(size=(13_000, 1)))
    vectors = vectors.astype(np.float32)
    some = np.arange(0, len(vectors), 100)
    found = neighbour_lists(vectors, count=48, metric=Metric.INNER_PRODUCT)
    assert share_found(found, -vectors[some] @ vectors.T, some) >= 0.9
