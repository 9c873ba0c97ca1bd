"""Chooses where searches run and indexes are built: on cores, or on a CUDA device.

`auto` takes a CUDA device if one can be used. All backends find the same rows; only the times
differ.
"""

import logging
from typing import TYPE_CHECKING

from schemas.errors import ConfigError, EngineFailed
from workers.vector.graph.build import GraphOf, own_graph
from workers.vector.kernels.arrays import Array
from workers.vector.limits import BUILDERS, DEVICES

if TYPE_CHECKING:
    from workers.vector.cuda.launch import CudaDevice

log = logging.getLogger("trivium.retrieval")


def cuda_device(device: str, number: int = 0) -> "CudaDevice | None":
    """Open the CUDA device that `device` asks for; None means cores. Raises ConfigError.

    `number` is the device's number among the visible ones.
    """
    if device not in DEVICES:
        raise ConfigError(f"device: expected one of {', '.join(DEVICES)}, found {device!r}")
    if device == "cpu":
        return None
    from workers.vector.cuda.launch import CudaDevice, reason_against

    if device == "auto" and reason_against() is not None:
        return None
    return CudaDevice(number)


def graph_builder(device: str, builder: str = "own", number: int = 0) -> GraphOf:
    """Return the function that builds an index's graph, for one thread; raises ConfigError.

    It opens the device once more, so searches may use it at the same time.
    """
    if builder not in BUILDERS:
        raise ConfigError(f"builder: expected one of {', '.join(BUILDERS)}, found {builder!r}")
    opened = cuda_device(device, number)
    if opened is None:
        if builder == "cuvs":
            raise ConfigError("builder cuvs: expected device cuda; or use our own builder")
        return own_graph
    from workers.vector.cuda import builder as own_builder
    from workers.vector.cuda import cuvs_graph

    return cuvs_graph.graph_on(opened) if builder == "cuvs" else own_builder.graph_on(opened)


def or_on_cores(graph_of: GraphOf) -> GraphOf:
    """Wrap a builder so that cores build if its device fails: a build must not end a worker."""
    if graph_of is own_graph:
        return graph_of

    def build(
        vectors: Array, degree: int, metric: int, stored: int, *, seed: int, threads: int
    ) -> Array:
        settings = {"seed": seed, "threads": threads}
        try:
            return graph_of(vectors, degree, metric, stored, **settings)
        except EngineFailed as error:
            log.warning("cores build the graph of %d rows: %s", len(vectors), error.message)
            return own_graph(vectors, degree, metric, stored, **settings)

    return build
