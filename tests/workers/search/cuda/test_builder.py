"""An index that is built on a device is the one that cores build."""

import numpy as np
import pytest

from tests.workers.search.cuda.emulator import COMPILER, EmulatedDevice
from tests.workers.search.data import gaussian
from workers.search.cuda import builder
from workers.search.cuda.device import Device
from workers.search.graph.build import own_graph
from workers.search.graph.knn import neighbours
from workers.search.index import inputs
from workers.search.index.index import Index
from workers.search.kernels.metrics import Metric, Storage


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dim", [20, 130])
@pytest.mark.parametrize("metric", [Metric.SQEUCLIDEAN, Metric.INNER_PRODUCT])
def test_neighbour_lists_equal_the_cpus(
    device: Device, monkeypatch: pytest.MonkeyPatch, storage: Storage, exact: bool, dim: int,
    metric: Metric,
) -> None:  # fmt: skip
    """Those of 130 values have codes there; by inner product the longest rows are near all."""
    monkeypatch.setattr("workers.search.graph.knn.EXACT_ROWS_MAX", 1_000 if exact else 0)
    monkeypatch.setattr(builder, "THREADS", 32)
    kind, drawn = (metric.number, storage.number), gaussian(150, dim)
    if metric is Metric.INNER_PRODUCT:
        drawn = (drawn + 3) * np.exp(gaussian(150, 1, seed=1))
    vectors = inputs.prepare(drawn, dim, metric, storage)
    cpu = neighbours(vectors, 24, *kind, seed=3, threads=1)
    gpu = builder.neighbours(device, vectors, 24, *kind, seed=3, exact_rows_max=1_000 * exact)
    assert cpu.tobytes() == gpu.tobytes()


@pytest.mark.skipif(COMPILER is None, reason="the emulator of CUDA kernels needs a C++ compiler")
@pytest.mark.parametrize("order", [3, 12_345])
def test_no_order_of_threads_changes_a_neighbour_list(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    monkeypatch.setattr("workers.search.graph.knn.EXACT_ROWS_MAX", 0)
    monkeypatch.setattr(builder, "THREADS", 64)
    kind = (Metric.SQEUCLIDEAN.number, Storage.FLOAT32.number)
    vectors = inputs.prepare(gaussian(150, 20), 20, Metric.SQEUCLIDEAN, Storage.FLOAT32)
    cpu = neighbours(vectors, 24, *kind, seed=3, threads=1)
    device = EmulatedDevice(order)
    gpu = builder.neighbours(device, vectors, 24, *kind, seed=3, exact_rows_max=0)
    assert cpu.tobytes() == gpu.tobytes()
    device.check()


def test_an_index_that_is_built_on_a_device_is_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "THREADS", 32)
    vectors = gaussian(120, 10)
    one = Index.build(vectors, degree=8, graph_of=own_graph)
    two = Index.build(vectors, degree=8, graph_of=builder.graph_on(device))
    assert one.graph.tobytes() == two.graph.tobytes()
