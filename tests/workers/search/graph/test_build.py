"""The graph that a build makes: what every row's edges are, and where searches may begin."""

from typing import Any

import numpy as np
import pytest

from tests.workers.search.data import gaussian, overlapping, separated
from workers.search.graph import build, entry_points, knn
from workers.search.index.index import Index
from workers.search.index.inputs import Metric, Storage, prepared
from workers.search.kernels.keys import EMPTY, held

DEGREE = 16


def lists(vectors: Any, count: int = 24, seed: int = 0) -> Any:
    """Neighbour lists as keys, as a build begins with."""
    rows = prepared(vectors, vectors.shape[1], Metric.SQEUCLIDEAN, Storage.FLOAT32)
    return knn.neighbours(
        rows, count, Metric.SQEUCLIDEAN.kernel, Storage.FLOAT32.kernel, seed=seed, threads=1
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 500, 30_000])
def test_edges_go_to_other_rows_once_each(rows: int) -> None:
    made = build.optimised(lists(overlapping(rows, 0, dim=12)[0]), DEGREE)
    assert made.shape == (rows, DEGREE) and made.dtype == np.uint32
    assert (made < rows).all()
    for row, edges in enumerate(made.tolist()):
        others = [edge for edge in edges if edge != row]
        assert len(set(others)) == len(others)
        assert edges == others + [row] * (DEGREE - len(others)), "empty places stand at the end"
        assert len(others) >= min(DEGREE // 2, rows - 1)


def test_the_nearer_half_is_that_of_the_pruned_lists() -> None:
    """Edges with the fewest detours, ties by rank; the reverse edges come after."""
    keys = lists(gaussian(300, 6))
    made = build.optimised(keys, DEGREE)
    near = [held(row[row < EMPTY])[0].tolist() for row in keys]
    for row, edges in enumerate(made.tolist()):
        detours = [sum(b in near[a] for a in near[row][:rank]) for rank, b in enumerate(near[row])]
        order = sorted(range(len(detours)), key=lambda rank: (detours[rank], rank))
        kept = [near[row][rank] for rank in order][: DEGREE // 2]
        assert edges[: DEGREE // 2] == kept


def test_neighbours_of_few_rows_are_exact_and_of_many_nearly() -> None:
    for rows, floor in ((700, 1.0), (30_000, 0.8)):
        vectors, _ = overlapping(rows, 0, dim=12)
        found = lists(vectors)
        some = np.arange(0, rows, rows // 100)
        scores = ((vectors[some, None] - vectors[None]) ** 2).sum(2) if rows < 1_000 else None
        if scores is None:
            norms = np.einsum("ij,ij->i", vectors, vectors)
            scores = norms - 2 * (vectors[some] @ vectors.T)
        scores[np.arange(len(some)), some] = np.inf
        truth = np.argsort(scores, axis=1)[:, :24]
        hits = sum(len({*held(found[row])[0].tolist()} & {*near.tolist()}) for row, near in
                   zip(some, truth, strict=True))  # fmt: skip
        assert hits / truth.size >= floor


def test_every_component_has_an_entry_point() -> None:
    vectors, _ = separated(4_000, 0, clusters=150, dim=16)
    index = Index.build(vectors, degree=8)
    roots = build.components(index.graph)
    assert len(np.unique(roots)) >= 100
    assert set(roots) == set(roots[index.entries])
    assert len(index.entries) >= entry_points.usual_count(4_000)
    assert (np.diff(index.entries) > 0).all()


def test_a_seed_and_the_rows_decide_everything() -> None:
    vectors, _ = overlapping(30_000, 0, dim=8)
    first, again, other = (lists(vectors, seed=seed) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()
