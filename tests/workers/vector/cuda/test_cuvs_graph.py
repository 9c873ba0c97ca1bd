"""cuVS as a builder: what a module in its place is asked, and cuVS itself on a card."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, EngineFailed
from tests.workers.vector.data import gaussian, nearest, overlapping, recall
from workers.vector.cuda import builder, cuvs_graph, feeds
from workers.vector.cuda.batch import BatchSettings, DeviceBatch
from workers.vector.cuda.cuvs_graph import Cagra
from workers.vector.cuda.launch import CudaDevice, reason_against
from workers.vector.engine import backend
from workers.vector.graph.build import own_graph
from workers.vector.index import inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.metrics import Metric, Storage


class Module(ModuleType):
    """`cuvs.neighbors.cagra` as of 26.10, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("cagra")
        self.calls: list[Any] = []

    def IndexParams(self, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(**options)

    def build(self, params: Any, vectors: Any) -> Any:
        graph = own_graph(vectors, params.graph_degree, 0, 0, seed=0, threads=1)
        return SimpleNamespace(graph=SimpleNamespace(copy_to_host=lambda: graph))

    def SearchParams(self, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(**options)

    def search(self, _params: Any, _index: Any, queries: Any, k: int) -> tuple[Any, Any]:
        return "distances", np.zeros((len(queries), k), np.uint32)


class CuvsError(Exception):
    """What cuVS raises."""


class Card:
    """The device that is current while cuVS builds."""

    def __init__(self) -> None:
        self.builds = 0

    @contextmanager
    def current(self) -> Iterator[None]:
        self.builds += 1
        yield


@pytest.fixture
def cagra(monkeypatch: pytest.MonkeyPatch) -> Module:
    module, parent = Module(), ModuleType("cuvs.neighbors")
    monkeypatch.setattr(parent, "cagra", module, raising=False)
    monkeypatch.setitem(sys.modules, "cuvs", ModuleType("cuvs"))
    monkeypatch.setitem(sys.modules, "cuvs.neighbors", parent)
    errors = ModuleType("cuvs.common.exceptions")
    monkeypatch.setattr(errors, "CuvsException", CuvsError, raising=False)
    monkeypatch.setitem(sys.modules, "cuvs.common", ModuleType("cuvs.common"))
    monkeypatch.setitem(sys.modules, "cuvs.common.exceptions", errors)
    return module


def test_index_takes_graph_of_cuvs(cagra: Module) -> None:
    vectors, card = gaussian(1_500, 12), Card()
    graph_of = cuvs_graph.graph_on(card)
    built = Index.build(vectors, degree=16, graph_of=graph_of)
    assert cagra.calls == [
        {"metric": "sqeuclidean", "graph_degree": 16, "intermediate_graph_degree": 24}
    ]
    assert built.search(vectors[:20])[0][:, 0].tolist() == list(range(20))
    Index.build(vectors, degree=16, metric=Metric.COSINE, graph_of=graph_of)
    assert cagra.calls[-1]["metric"] == "inner_product"  # of vectors that have length 1
    assert card.builds == 2


def test_cagra_baseline_passes_search_parameters(cagra: Module) -> None:
    rows = Cagra.build(gaussian(200, 8), 16).search(gaussian(3, 8), 10, 64, samplings=8)
    assert rows.shape == (3, 10)
    assert cagra.calls[-1] == {"itopk_size": 64, "num_random_samplings": 8}


def test_cuvs_builder_leaves_few_rows_to_cores(cagra: Module) -> None:
    vectors = gaussian(24, 8)
    built = Index.build(vectors, degree=16, graph_of=cuvs_graph.graph_on(Card()))
    assert built.search(vectors)[0][:, 0].tolist() == list(range(24))
    assert not cagra.calls


def test_worker_builds_graph_on_cores_after_cuvs_failure(
    cagra: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(_params: Any, _vectors: Any) -> Any:
        raise CuvsError("out of memory")

    monkeypatch.setattr(cagra, "build", build)
    vectors, graph_of = gaussian(100, 8), cuvs_graph.graph_on(Card())
    with pytest.raises(EngineFailed, match="cuVS: out of memory"):
        Index.build(vectors, degree=16, graph_of=graph_of)
    built = Index.build(vectors, degree=16, graph_of=backend.or_on_cores(graph_of))
    assert built.graph.tobytes() == Index.build(vectors, degree=16).graph.tobytes()
    assert "cores build the graph of 100 rows: cuVS: out of memory" in caplog.text


def test_cuvs_builder_names_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuvs", None)
    with pytest.raises(ConfigError, match="cuVS is missing .*; install cuvs-cu12 or cuvs-cu13"):
        cuvs_graph.graph_on(Card())


@pytest.mark.gpu
@pytest.mark.parametrize("metric", [Metric.SQEUCLIDEAN, Metric.COSINE])
@pytest.mark.parametrize("storage", list(Storage))
def test_device_engine_and_cagra_search_both_graphs(metric: Metric, storage: Storage) -> None:
    if (why := reason_against()) is not None:
        pytest.skip(why)
    pytest.importorskip("cuvs")
    vectors, queries = overlapping(20_000, 500)
    if metric is Metric.COSINE:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    truth = nearest(vectors, queries, 10)
    device = CudaDevice()
    batch = DeviceBatch(device, BatchSettings())
    for graph_of in (builder.graph_on(device), cuvs_graph.graph_on(device)):
        index = Index.build(vectors, metric=metric, storage=storage, graph_of=graph_of)
        view = index.view()
        prepared = inputs.prepare(queries, view.dim, metric)
        own_rows = feeds.search_all(batch, Effort(k=10, top_m=128), prepared, view).rows
        assert recall(own_rows, truth) > 0.95
        name = "sqeuclidean" if metric is Metric.SQEUCLIDEAN else "inner_product"
        stored = np.ascontiguousarray(view.vectors[: view.count])
        cagra = Cagra.of_graph(stored, index.graph, name)
        device_queries = cagra.uploaded(prepared.astype(stored.dtype))
        cagra_rows = cagra.search(device_queries, 10, 128).copy_to_host()
        assert recall(cagra_rows, truth) > 0.95
