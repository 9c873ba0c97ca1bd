"""Rows with equal vectors: which are nodes, and what leads to the others."""

import numpy as np
import pytest

from tests.workers.vector.data import gaussian
from workers.vector.graph import duplicates
from workers.vector.graph.build import own_graph
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.keys import NOWHERE
from workers.vector.kernels.metrics import INNER_PRODUCT, SQUARED_L2

NODE_OF = [0, 1, 0, 3, 1, 0, 6]


def of_each(node_of: list[int], dtype: type = np.float32) -> Array:
    """Vectors of 16 values, equal where the nodes are."""
    vectors: Array = gaussian(len(node_of), 16)[node_of].astype(dtype)
    return vectors


@pytest.mark.parametrize("metric", [SQUARED_L2, INNER_PRODUCT])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_first_equal_finds_first_of_equal_rows(dtype: type, metric: int) -> None:
    assert duplicates.first_equal(of_each(NODE_OF, dtype), metric).tolist() == NODE_OF
    zeros: Array = np.zeros((3, 16), dtype)
    zeros[1] = -zeros[1]
    assert duplicates.first_equal(zeros, SQUARED_L2).tolist() == [0, 1, 0]
    assert duplicates.first_equal(zeros[:0], SQUARED_L2).tolist() == []


def test_duplicates_compare_rows_with_equal_hashes() -> None:
    words = duplicates._words(of_each([0, 1, 2, 1]))
    first_rows = duplicates._first_of_runs(words, np.zeros(4, np.uint64), np.arange(4))
    assert first_rows.tolist() == [0, 1, 2, 3], "a copy may become a node, a node never a copy"


def test_duplicate_chains_ascend_and_grow() -> None:
    chain = duplicates.chain_of(np.array(NODE_OF))
    assert chain is not None
    end = NOWHERE
    assert chain[:, 0].tolist() == [2, 4, 5, end, end, end, end]
    assert duplicates.heads(chain).tolist() == NODE_OF
    assert duplicates.nodes(chain, 7).tolist() == [0, 1, 3, 6]
    assert duplicates.are_lone(chain).tolist() == [False] * 3 + [True] + [False] * 2 + [True]
    longer = np.concatenate([chain, duplicates.empty_chain(4)])
    after = duplicates.append(longer, np.array([7, 9, 10]), np.array([3, 8, 0, 3]))
    assert after.tolist() == [3, 5, 7]
    assert duplicates.heads(longer).tolist() == [*NODE_OF, 3, 8, 0, 3]
    assert duplicates.chain_of(np.arange(5)) is None
    assert duplicates.nodes(None, 3).tolist() == [0, 1, 2]


def test_graph_is_built_over_distinct_vectors() -> None:
    """Duplicates would fill each other's neighbour lists."""
    distinct = gaussian(100, 16)
    node_of = np.sort(np.random.default_rng(0).integers(0, 100, 1_000))

    def graph_of(vectors: Array) -> Array:
        return own_graph(vectors, 8, 0, 0, seed=0, threads=1)

    graph, chain = duplicates.over_nodes(distinct[node_of], SQUARED_L2, graph_of)
    nodes = duplicates.nodes(chain, 1_000)
    of = np.unique(node_of)
    assert (graph[nodes] == nodes[graph_of(distinct[of])]).all()
    same = np.setdiff1d(np.arange(1_000), nodes)
    assert (node_of[graph[same]] == node_of[same, None]).all()
    assert np.isin(graph, nodes).all()
    assert duplicates.over_nodes(distinct, SQUARED_L2, graph_of)[1] is None
