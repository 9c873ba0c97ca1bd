"""Lists of nearest neighbours."""

import numpy as np

from tests.workers.search.data import neighbour_lists, overlapping
from workers.search.kernels.keys import rows_and_distances


def test_neighbours_of_few_rows_are_exact_and_of_many_nearly() -> None:
    for rows, floor in ((700, 1.0), (13_000, 0.8)):
        vectors, _ = overlapping(rows, 0, dim=12)
        found = neighbour_lists(vectors)
        some = np.arange(0, rows, rows // 100)
        scores = ((vectors[some, None] - vectors[None]) ** 2).sum(2) if rows < 1_000 else None
        if scores is None:
            norms = np.einsum("ij,ij->i", vectors, vectors)
            scores = norms - 2 * (vectors[some] @ vectors.T)
        scores[np.arange(len(some)), some] = np.inf
        truth = np.argsort(scores, axis=1)[:, :24]
        rows_found = [rows_and_distances(found[row])[0].tolist() for row in some]
        pairs = zip(rows_found, truth.tolist(), strict=True)
        hits = sum(len({*ours} & {*near}) for ours, near in pairs)
        assert hits / truth.size >= floor


def test_a_seed_and_the_rows_decide_everything() -> None:
    vectors, _ = overlapping(13_000, 0, dim=8)
    first, again, other = (neighbour_lists(vectors, seed=seed) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()
