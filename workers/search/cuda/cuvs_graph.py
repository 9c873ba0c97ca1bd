"""A search graph that cuVS CAGRA builds, and CAGRA's own search, the baseline: the one file that
imports it. Optional; `builder.py` is our own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import ConfigError, InvalidRequest
from workers.search.kernels.arrays import Array
from workers.search.kernels.metrics import SQUARED_L2


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
    """An index of cuVS; vectors have shape (rows, dim), float32, and lie on the host."""

    module: Any
    index: Any

    @classmethod
    def build(cls, vectors: Array, degree: int, metric: str = "sqeuclidean") -> "Cagra":
        """Build one with cuVS's own choice of intermediate degree, 1.5 times the degree."""
        cagra = _cagra()
        params = cagra.IndexParams(
            metric=metric, graph_degree=degree, intermediate_graph_degree=degree * 3 // 2
        )
        return cls(cagra, cagra.build(params, vectors))

    def graph(self) -> Array:
        """Its edges: shape (rows, degree), uint32."""
        found: Array = np.asarray(self.index.graph.copy_to_host(), np.uint32)
        return found

    def uploaded(self, queries: Array) -> Any:
        """Queries on the device, as `search` takes them."""
        from pylibraft.common import device_ndarray  # comes with cuVS

        return device_ndarray(queries)

    def search(self, queries: Any, k: int, itopk: int, *, samplings: int = 1) -> Any:
        """Rows of the nearest, on the device, where `copy_to_host` brings them from."""
        params = self.module.SearchParams(itopk_size=itopk, num_random_samplings=samplings)
        return self.module.search(params, self.index, queries, k)[1]


def check(on_device: bool) -> None:
    """Raise ConfigError where cuVS cannot build."""
    if not on_device:
        raise ConfigError("builder cuvs: expected device cuda; or use our own builder")
    _cagra()


def graph_of(
    vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
) -> Array:
    """The search graph of stored vectors: shape (rows, degree), uint32; cuVS takes no seed."""
    del seed, threads, stored
    if len(vectors) <= degree * 3 // 2:
        raise InvalidRequest(
            f"builder cuvs: expected more than {degree * 3 // 2} rows, found {len(vectors)}; "
            "use our own builder"
        )
    name = "sqeuclidean" if metric == SQUARED_L2 else "inner_product"
    return Cagra.build(vectors, degree, name).graph()
