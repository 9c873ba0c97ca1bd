"""The protocol of a device for the CUDA backend; `launch.py` is the real one, tests emulate one.

Graphs run one after the other, in the order in which they were launched. Copies and `run_now` do
not wait for them. Addresses of pinned memory are the same for host and device, so kernels read and
write host arrays, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from workers.vector.kernels.arrays import Array


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
        """Return the address of the memory, a multiple of 256."""


class Event(Protocol):
    """Handle of one launched run of a graph."""

    def wait(self) -> None:
        """Wait until the run is over; raises EngineFailed if the device failed."""


class Graph(Protocol):
    """Kernels that are launched together, one after the other."""

    def launch(self) -> Event:
        """Launch the graph without waiting for it."""


class Device(Protocol):
    """One device, used by one thread at a time."""

    multiprocessors: int

    def memory(self, size_bytes: int) -> DeviceMemory:
        """Allocate zeroed memory; raises EngineFailed if there is too little."""

    def pinned(self, size_bytes: int) -> Array:
        """Allocate zeroed host memory that kernels can use, uint8."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy between or within host and device, concurrently with running graphs; blocks."""

    def run_now(self, launch: Launch) -> None:
        """Run one kernel concurrently with running graphs, and wait for it."""

    def graph(self, launches: Sequence[Launch]) -> Graph:
        """Capture launches as one graph that can be run again."""


def pinned_array(device: Device, shape: tuple[int, ...], dtype: Any) -> Array:
    """Allocate a zeroed host array that kernels can use."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array: Array = device.pinned(max(1, size))[:size].view(dtype).reshape(shape)
    return array


def upload(device: Device, array: Array) -> DeviceMemory:
    """Copy a contiguous array to new device memory."""
    assert array.flags.c_contiguous, "an array with gaps has no single copy"
    memory = device.memory(max(1, array.nbytes))
    if array.nbytes:
        device.copy(memory.address, array.ctypes.data, array.nbytes)
    return memory
