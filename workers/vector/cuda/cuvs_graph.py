"""Builds search graphs with cuVS CAGRA, and runs CAGRA's own search as a baseline.

This is the only file that imports cuVS, which is optional; `builder.py` is our own builder.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from schemas.errors import ConfigError, EngineFailed
from workers.vector.graph.build import GraphOf, own_graph
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.metrics import SQUARED_L2


def _cagra() -> Any:
    try:
        from cuvs.neighbors import cagra
    except ImportError as error:
        raise ConfigError(
            f"builder cuvs: cuVS is missing ({error}); install cuvs-cu12 or cuvs-cu13, whichever "
            "fits the driver, or use our own builder"
        ) from error
    return cagra


@dataclass(frozen=True, slots=True)
class Cagra:
    """An index of cuVS; vectors are float32 (rows, dim) in host memory."""

    module: Any
    index: Any

    @classmethod
    def build(cls, vectors: Array, degree: int, metric: str = "sqeuclidean") -> "Cagra":
        """Build an index with an intermediate degree of 1.5 times the degree, cuVS's default."""
        cagra = _cagra()
        params = cagra.IndexParams(
            metric=metric, graph_degree=degree, intermediate_graph_degree=degree * 3 // 2
        )
        return cls(cagra, cagra.build(params, vectors))

    @classmethod
    def of_graph(cls, vectors: Array, graph: Array, metric: str = "sqeuclidean") -> "Cagra":
        """Make an index of a graph from another builder: uint32 (rows, degree)."""
        cagra = _cagra()
        return cls(cagra, cagra.from_graph(graph, vectors, metric=metric))

    def graph(self) -> Array:
        """Return the index's edges: uint32 (rows, degree)."""
        edges: Array = np.asarray(self.index.graph.copy_to_host(), np.uint32)
        return edges

    def uploaded(self, queries: Array) -> Any:
        """Copy queries to the device, as `search` takes them."""
        from pylibraft.common import device_ndarray  # comes with cuVS

        return device_ndarray(queries)

    def search(self, queries: Any, k: int, itopk: int, *, samplings: int = 1) -> Any:
        """Return the nearest rows as a device array, which has `copy_to_host`."""
        params = self.module.SearchParams(itopk_size=itopk, num_random_samplings=samplings)
        return self.module.search(params, self.index, queries, k)[1]


class CurrentDevice(Protocol):
    """The part of a device that cuVS needs: cuVS uses the thread's current device."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context that makes this the thread's current device."""


def graph_on(device: CurrentDevice) -> GraphOf:
    """Return a function that builds graphs with cuVS; raises ConfigError if cuVS is missing."""
    _cagra()
    from cuvs.common.exceptions import CuvsException

    def graph_of(
        vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
    ) -> Array:
        """Build a graph, see `GraphOf`. cuVS takes no seed, and needs more rows than its lists are
        long; cores build the graph of fewer rows. Raises EngineFailed if cuVS fails.
        """
        if len(vectors) <= degree * 3 // 2:
            return own_graph(vectors, degree, metric, stored, seed=seed, threads=threads)
        name = "sqeuclidean" if metric == SQUARED_L2 else "inner_product"
        try:
            with device.current():
                return Cagra.build(vectors, degree, name).graph()
        except (CuvsException, MemoryError) as error:
            raise EngineFailed(f"cuVS: {error}") from error

    return graph_of
