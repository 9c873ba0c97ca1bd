"""What linking keeps beside the graph."""

import numpy as np
import pytest

from tests.workers.vector.data import overlapping
from workers.vector.index.index import Index
from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.distances import distance, load
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address
from workers.vector.kernels.metrics import Metric, Storage


@kernel
def _lengths(vectors: Array, graph: Array, metric: int, stored: int, out: Array) -> None:
    """Of the first edges of each row; queries are float32 copies, as where rows are linked."""
    query = np.empty(vectors.shape[1], np.float32)
    for row in range(len(graph)):
        load(address(vectors) + row * vectors.strides[0], address(query), len(query), stored)
        for i in range(out.shape[1]):
            at = address(vectors) + np.int64(graph[row, i]) * vectors.strides[0]
            out[row, i] = distance(at, address(query), len(query), metric, stored)


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("storage", Storage)
def test_linking_keeps_true_edge_lengths(metric: Metric, storage: Storage) -> None:
    """They stay true after an unpublished link that had already changed them."""
    vectors, _ = overlapping(3_400, 0, dim=64)
    index = Index(64, degree=16, metric=metric, storage=storage, threads=1)
    index.upsert(range(3_000), vectors[:3_000])
    index.link(3_000)
    index.upsert(range(3_000, 3_400), vectors[3_000:])
    for batch in range(4):
        if batch == 2:
            void_links = index._link_rows(index.view(), 3_300, index.neighbours)
            assert len(void_links.graph) == 3_300
        index.link(100)
    graph, view = index.graph, index.view()
    lengths = index.links.notes(len(graph)).lengths[: len(graph)]
    expected = np.empty(lengths.shape, np.float32)
    _lengths(stored_bits(view.vectors), graph, metric.number, storage.number, expected)
    has_lengths = ~np.isnan(lengths[:, 0])
    assert has_lengths[3_200:].all() and 100 < has_lengths[:3_000].sum()
    is_edge = graph[:, : lengths.shape[1]] != np.arange(len(graph))[:, None]
    assert (lengths == expected)[has_lengths[:, None] & is_edge].all()
