"""Exact lists, beside a scan by the kernel's own distances."""

from typing import Any

import numpy as np
import pytest

from tests.workers.vector.data import overlapping
from workers.vector.graph import exact
from workers.vector.graph.knn import even_spans, insert_peers
from workers.vector.index import inputs
from workers.vector.kernels.arrays import Array, stored_bits
from workers.vector.kernels.keys import EMPTY, rows_and_distances
from workers.vector.kernels.metrics import Metric, Storage


def scanned(vectors: Array, count: int, metric: Metric, storage: Storage) -> Array:
    """Each row introduced to all others."""
    rows = np.arange(len(vectors))
    keys = np.full((len(rows), count), EMPTY, np.uint64)
    insert_peers(
        stored_bits(vectors), rows, np.tile(rows, len(rows)), even_spans(len(rows), len(rows)),
        keys, metric.number, storage.number,
    )  # fmt: skip
    return keys


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("rows", [1, 2, 33, 200])
def test_exact_neighbours_equal_scan(rows: int, storage: Storage, metric: Metric) -> None:
    points, _ = overlapping(rows, 0, dim=19)
    vectors = inputs.prepare(points, 19, metric, storage)
    expected = scanned(vectors, 24, metric, storage)
    for threads in (1, 2):
        lists = exact.neighbours(vectors, 24, metric.number, storage.number, threads=threads)
        assert lists.tobytes() == expected.tobytes()


@pytest.mark.parametrize("metric", list(Metric))
def test_exact_nearest_others_equal_scan(metric: Metric, monkeypatch: Any) -> None:
    """Panels take rows part by part, and 70 queries are more than a block."""
    monkeypatch.setattr(exact, "_PART_ROWS", 96)
    points, _ = overlapping(500, 0, dim=19)
    vectors = inputs.prepare(points, 19, metric, Storage.FLOAT16)
    rows = np.arange(3, 500, 7)[:70]
    kernel = metric.number, Storage.FLOAT16.number
    listed = rows_and_distances(scanned(vectors, 499, metric, Storage.FLOAT16)[rows])[0]
    expected = [nearest_rows[~np.isin(nearest_rows, rows)][:24] for nearest_rows in listed]
    for threads in (1, 2):
        neighbours = exact.nearest_others(vectors, rows, 24, *kernel, threads=threads)
        assert neighbours.tolist() == np.array(expected).tolist()


def test_dims_used_skips_trailing_zeros() -> None:
    vectors = np.zeros((5, 32), np.float32)
    assert exact.dims_used(vectors) == 1
    vectors[3, 6] = -1
    assert exact.dims_used(vectors) == 7
