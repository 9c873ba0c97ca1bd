"""The graph that a build makes: what every row's edges are, and where searches may begin."""

import numpy as np
import pytest

from tests.workers.search.data import gaussian, neighbour_lists, overlapping
from workers.search.graph import build
from workers.search.kernels.keys import EMPTY, rows_and_distances

DEGREE = 16


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 500, 30_000])
def test_edges_go_to_other_rows_once_each(rows: int) -> None:
    made = build.optimise_graph(neighbour_lists(overlapping(rows, 0, dim=12)[0]), DEGREE)
    assert made.shape == (rows, DEGREE) and made.dtype == np.uint32
    assert (made < rows).all()
    for row, edges in enumerate(made.tolist()):
        others = [edge for edge in edges if edge != row]
        assert len(set(others)) == len(others)
        assert edges == others + [row] * (DEGREE - len(others)), "empty places stand at the end"
        assert len(others) >= min(DEGREE // 2, rows - 1)


def test_the_nearer_half_is_that_of_the_pruned_lists() -> None:
    """Edges with the fewest detours, ties by rank; the reverse edges come after."""
    keys = neighbour_lists(gaussian(300, 6))
    made = build.optimise_graph(keys, DEGREE)
    near = [rows_and_distances(row[row < EMPTY])[0].tolist() for row in keys]
    for row, edges in enumerate(made.tolist()):
        detours = [sum(b in near[a] for a in near[row][:rank]) for rank, b in enumerate(near[row])]
        order = sorted(range(len(detours)), key=lambda rank: (detours[rank], rank))
        kept = [near[row][rank] for rank in order][: DEGREE // 2]
        assert edges[: DEGREE // 2] == kept
