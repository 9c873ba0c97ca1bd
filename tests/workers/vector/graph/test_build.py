"""The graph that a build makes: what every row's edges are, and where searches may begin."""

import numpy as np
import pytest

from tests.workers.vector.data import gaussian, neighbour_lists, overlapping
from workers.vector.graph import build
from workers.vector.kernels.keys import EMPTY, rows_and_distances

DEGREE = 16


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 500, 30_000])
def test_graph_edges_go_to_distinct_other_rows(rows: int) -> None:
    graph = build.optimise_graph(neighbour_lists(overlapping(rows, 0, dim=12)[0]), DEGREE)
    assert graph.shape == (rows, DEGREE) and graph.dtype == np.uint32
    assert (graph < rows).all()
    for row, edges in enumerate(graph.tolist()):
        neighbours = [edge for edge in edges if edge != row]
        assert len(set(neighbours)) == len(neighbours)
        assert edges == neighbours + [row] * (DEGREE - len(neighbours)), (
            "empty places stand at the end"
        )
        assert len(neighbours) >= min(DEGREE // 2, rows - 1)


def test_graph_nearer_half_comes_from_pruned_lists() -> None:
    """The edges have the fewest detours, ties by rank; reverse edges come after."""
    keys = neighbour_lists(gaussian(300, 6))
    graph = build.optimise_graph(keys, DEGREE)
    near = [rows_and_distances(row[row < EMPTY])[0].tolist() for row in keys]
    for row, edges in enumerate(graph.tolist()):
        detours = [sum(b in near[a] for a in near[row][:rank]) for rank, b in enumerate(near[row])]
        order = sorted(range(len(detours)), key=lambda rank: (detours[rank], rank))
        expected = [near[row][rank] for rank in order][: DEGREE // 2]
        assert edges[: DEGREE // 2] == expected
