"""An index that is built on a device is the one that cores build."""

import numpy as np
import pytest

from tests.workers.vector.cuda.emulator import COMPILER, EmulatedDevice
from tests.workers.vector.data import gaussian
from workers.vector.cuda import builder
from workers.vector.cuda.device import Device
from workers.vector.graph.build import own_graph
from workers.vector.graph.knn import neighbours
from workers.vector.index import inputs
from workers.vector.index.index import Index
from workers.vector.kernels.metrics import Metric, Storage


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dim", [20, 130])
@pytest.mark.parametrize("metric", [Metric.SQEUCLIDEAN, Metric.INNER_PRODUCT])
def test_device_neighbour_lists_equal_cpu(
    device: Device, monkeypatch: pytest.MonkeyPatch, storage: Storage, exact: bool, dim: int,
    metric: Metric,
) -> None:  # fmt: skip
    """Vectors of 130 values have codes; by inner product the longest rows are near all."""
    monkeypatch.setattr("workers.vector.graph.knn.EXACT_ROWS_MAX", 1_000 if exact else 0)
    monkeypatch.setattr(builder, "THREADS", 32)
    kind, points = (metric.number, storage.number), gaussian(150, dim)
    if metric is Metric.INNER_PRODUCT:
        points = (points + 3) * np.exp(gaussian(150, 1, seed=1))
    vectors = inputs.prepare(points, dim, metric, storage)
    cpu = neighbours(vectors, 24, *kind, seed=3, threads=1)
    gpu = builder.neighbours(device, vectors, 24, *kind, seed=3, exact_rows_max=1_000 * exact)
    assert cpu.tobytes() == gpu.tobytes()


@pytest.mark.skipif(COMPILER is None, reason="the emulator of CUDA kernels needs a C++ compiler")
@pytest.mark.parametrize("order", [3, 12_345])
def test_thread_order_does_not_change_neighbour_lists(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    monkeypatch.setattr("workers.vector.graph.knn.EXACT_ROWS_MAX", 0)
    monkeypatch.setattr(builder, "THREADS", 64)
    kind = (Metric.SQEUCLIDEAN.number, Storage.FLOAT32.number)
    vectors = inputs.prepare(gaussian(150, 20), 20, Metric.SQEUCLIDEAN, Storage.FLOAT32)
    cpu = neighbours(vectors, 24, *kind, seed=3, threads=1)
    device = EmulatedDevice(order)
    gpu = builder.neighbours(device, vectors, 24, *kind, seed=3, exact_rows_max=0)
    assert cpu.tobytes() == gpu.tobytes()
    device.check()


def test_index_built_on_device_equals_cpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "THREADS", 32)
    vectors = gaussian(120, 10)
    cpu = Index.build(vectors, degree=8, graph_of=own_graph)
    gpu = Index.build(vectors, degree=8, graph_of=builder.graph_on(device))
    assert cpu.graph.tobytes() == gpu.graph.tobytes()
