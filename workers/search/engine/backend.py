"""Where searches run and indexes are built: on cores, or on a CUDA device.

`auto` takes a CUDA device where one can be used. All backends find the same rows; what differs is
the time.
"""

from typing import TYPE_CHECKING

from schemas.errors import ConfigError
from workers.search.graph.build import GraphOf, own_graph
from workers.search.limits import DEVICES

if TYPE_CHECKING:
    from workers.search.cuda.device import Device

BUILDERS = ("own", "cuvs")


def cuda_device(device: str, number: int = 0) -> "Device | None":
    """The CUDA device that `device` asks for, opened, or None for cores; raises ConfigError.

    `number` says which of those that are visible.
    """
    if device not in DEVICES:
        raise ConfigError(f"device: expected one of {', '.join(DEVICES)}, found {device!r}")
    if device == "cpu":
        return None
    from workers.search.cuda.launch import CudaDevice, reason_against

    if device == "auto" and reason_against() is not None:
        return None
    return CudaDevice(number)


def graph_builder(device: str, builder: str = "own") -> GraphOf:
    """What makes the graph of an index that is built; raises ConfigError."""
    if builder not in BUILDERS:
        raise ConfigError(f"builder: expected one of {', '.join(BUILDERS)}, found {builder!r}")
    opened = cuda_device(device)
    if builder == "cuvs":
        from workers.search.cuda import cuvs_graph

        cuvs_graph.check(opened is not None)
        return cuvs_graph.graph_of
    if opened is None:
        return own_graph
    from workers.search.cuda.builder import graph_on

    return graph_on(opened)
