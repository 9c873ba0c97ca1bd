"""What the CUDA backend needs of a device; `launch.py` is the real one, tests emulate another.

Graphs run one after the other, in the order in which they were launched. Copies, and what else is
done on return, do not wait for them. Addresses are the same numbers for host and device where
memory is pinned, so kernels read and write host arrays too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from workers.search.kernels.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel of a graph; it gets the address of a structure of `layout.py`, and a number."""

    kernel: str
    grid: int
    threads: int
    shared_bytes: int = 0
    structure: int
    number: int = 0


class DeviceMemory(Protocol):
    """Device memory; it is freed with the object."""

    @property
    def address(self) -> int:
        """Where it begins, a multiple of 256."""


class Event(Protocol):
    """Handle of one launched run of a graph."""

    def wait(self) -> None:
        """Until it is over; raises EngineFailed where the device failed."""


class Graph(Protocol):
    """Kernels that are launched together, one after the other."""

    def launch(self) -> Event:
        """Do not wait for it."""


class Device(Protocol):
    """One device, used by one thread at a time."""

    multiprocessors: int

    def memory(self, size_bytes: int) -> DeviceMemory:
        """Zeroed memory; raises EngineFailed where there is too little."""

    def pinned(self, size_bytes: int) -> Array:
        """Zeroed host memory that kernels can use, uint8."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Between host and device or within it; done on return, beside the graphs under way."""

    def run_now(self, launch: Launch) -> None:
        """One kernel that is done on return, beside the graphs under way."""

    def graph(self, launches: Sequence[Launch]) -> Graph:
        """Capture launches as one graph that can be run again."""


def pinned_array(device: Device, shape: tuple[int, ...], dtype: Any) -> Array:
    """A zeroed host array that kernels can use."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array: Array = device.pinned(max(1, size))[:size].view(dtype).reshape(shape)
    return array


def upload(device: Device, array: Array) -> DeviceMemory:
    """A copy of a contiguous array."""
    assert array.flags.c_contiguous, "an array with gaps has no single copy"
    memory = device.memory(max(1, array.nbytes))
    if array.nbytes:
        device.copy(memory.address, array.ctypes.data, array.nbytes)
    return memory
