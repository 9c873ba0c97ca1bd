"""cuVS as a builder, with a module that stands for it: what it is asked, and when it is refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, InvalidRequest
from tests.workers.search.data import gaussian
from workers.search.cuda import cuvs_graph
from workers.search.cuda.cuvs_graph import Cagra
from workers.search.graph.build import own_graph
from workers.search.index.index import Index
from workers.search.kernels.metrics import Metric


class Module(ModuleType):
    """`cuvs.neighbors.cagra` as of 26.10, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("cagra")
        self.asked: list[Any] = []

    def IndexParams(self, **named: Any) -> Any:
        self.asked.append(named)
        return SimpleNamespace(**named)

    def build(self, params: Any, vectors: Any) -> Any:
        made = own_graph(vectors, params.graph_degree, 0, 0, seed=0, threads=1)
        return SimpleNamespace(graph=SimpleNamespace(copy_to_host=lambda: made))

    def SearchParams(self, **named: Any) -> Any:
        self.asked.append(named)
        return SimpleNamespace(**named)

    def search(self, _params: Any, _index: Any, queries: Any, k: int) -> tuple[Any, Any]:
        return "distances", np.zeros((len(queries), k), np.uint32)


@pytest.fixture
def cagra(monkeypatch: pytest.MonkeyPatch) -> Module:
    module, parent = Module(), ModuleType("cuvs.neighbors")
    monkeypatch.setattr(parent, "cagra", module, raising=False)
    monkeypatch.setitem(sys.modules, "cuvs", ModuleType("cuvs"))
    monkeypatch.setitem(sys.modules, "cuvs.neighbors", parent)
    return module


def test_an_index_may_have_the_graph_of_cuvs(cagra: Module) -> None:
    vectors = gaussian(1_500, 12)
    cuvs_graph.check(True)
    built = Index.build(vectors, degree=16, graph_of=cuvs_graph.graph_of)
    assert cagra.asked == [
        {"metric": "sqeuclidean", "graph_degree": 16, "intermediate_graph_degree": 24}
    ]
    assert built.search(vectors[:20])[0][:, 0].tolist() == list(range(20))
    Index.build(vectors, degree=16, metric=Metric.COSINE, graph_of=cuvs_graph.graph_of)
    assert cagra.asked[-1]["metric"] == "inner_product"  # of vectors that have length 1


def test_its_search_is_the_baseline(cagra: Module) -> None:
    found = Cagra.build(gaussian(200, 8), 16).search(gaussian(3, 8), 10, 64, samplings=8)
    assert found.shape == (3, 10)
    assert cagra.asked[-1] == {"itopk_size": 64, "num_random_samplings": 8}


def test_too_few_rows_are_refused(cagra: Module) -> None:
    with pytest.raises(InvalidRequest, match="builder cuvs: expected more than 24 rows, found 24"):
        Index.build(gaussian(24, 8), degree=16, graph_of=cuvs_graph.graph_of)
    assert not cagra.asked


def test_without_cuvs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuvs", None)
    with pytest.raises(ConfigError, match="cuVS is missing .*; install cuvs-cu12 or cuvs-cu13"):
        cuvs_graph.check(True)
