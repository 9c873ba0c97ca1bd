"""A CUDA device through CuPy: the only file that imports it. `device.py` has the protocol.

NVRTC compiles the kernels when a device is opened, for the card that is present; each is loaded
before a graph with it is captured. CuPy keeps compiled code and freed memory for reuse. A graph has
raw addresses: the caller that captures it keeps the memory alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from schemas.errors import ConfigError, EngineFailed
from workers.vector.cuda import layout
from workers.vector.cuda.device import Launch
from workers.vector.kernels.arrays import Array

OPTIONS = ("--std=c++17", "--fmad=false")  # only the sums that distances.py fuses are fused
_DEFAULT_SHARED_BYTES = 48 << 10  # a kernel must request more than that
_AHEAD_BYTES, _AHEAD_COPIES = 256 << 20, 16  # some milliseconds of copies before timed launches


def reason_against() -> str | None:
    """Return why no device can be used here, with a remedy; None if one can be used."""
    try:
        import cupy
    except ImportError as error:
        return (
            f"CuPy is missing ({error}); install the gpu extra, or cupy-cuda12x or cupy-cuda13x, "
            "whichever fits the driver"
        )
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy found no CUDA driver that works ({error}); `nvidia-smi` tells more"
    if not count:
        return "no CUDA device is visible; look at CUDA_VISIBLE_DEVICES"
    return None


class CudaDevice:
    """One CUDA card; raises ConfigError if it cannot be used."""

    def __init__(self, number: int = 0) -> None:
        if (why := reason_against()) is not None:
            raise ConfigError(f"device cuda: {why}; or choose device cpu")
        import cupy

        if number >= (count := cupy.cuda.runtime.getDeviceCount()):
            raise ConfigError(
                f"cuda_device: expected a number below {count}, as many devices as are visible, "
                f"found {number}; `nvidia-smi -L` lists them"
            )
        self._cupy, self._card = cupy, cupy.cuda.Device(number)
        self.multiprocessors = int(self._card.attributes["MultiProcessorCount"])
        self.name = str(cupy.cuda.runtime.getDeviceProperties(number)["name"].decode())
        with self._card:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._copies = cupy.cuda.Stream(non_blocking=True)  # concurrent with running graphs
            self._module = cupy.RawModule(code=layout.source(), options=OPTIONS)
            self._kernels = {name: self._module.get_function(name) for name in layout.KERNELS}

    def current(self) -> Any:
        """Return a context that makes this the thread's current device."""
        return self._card

    def memory(self, size_bytes: int) -> "CudaMemory":
        cupy = self._cupy
        try:
            with self._card, self._stream:
                allocation = cupy.cuda.alloc(size_bytes)
                allocation.memset_async(0, size_bytes, self._copies)
                self._copies.synchronize()
        except cupy.cuda.memory.OutOfMemoryError as error:
            why = f"{self.name}: {error}; use fewer slots, or smaller shards"
            raise EngineFailed(why) from None
        return CudaMemory(allocation)

    def pinned(self, size_bytes: int) -> Array:
        with self._card:
            memory = self._cupy.cuda.alloc_pinned_memory(size_bytes)
        array: Array = np.frombuffer(memory, np.uint8, size_bytes)
        array[:] = 0
        return array

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        with self._card:
            kind = runtime.memcpyDefault
            runtime.memcpyAsync(target, source, size_bytes, kind, self._copies.ptr)
            self._copies.synchronize()

    def run_now(self, launch: Launch) -> None:
        self._prepare([launch])
        with self._card, self._copies:
            self._enqueue(launch)
            self._copies.synchronize()

    def graph(self, launches: Sequence[Launch]) -> "CudaGraph":
        """Capture launches as a graph; kernels are loaded before, which a capture must not do."""
        self._prepare(launches)
        with self._card, self._stream:
            self._stream.begin_capture()
            for launch in launches:
                self._enqueue(launch)
            return CudaGraph(self, self._stream.end_capture())

    def run(self, graph: Any) -> "CudaEvent":
        """Launch a captured graph, and return its event."""
        with self._card:
            graph.launch(self._stream)
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
        return CudaEvent(self, event)

    def times_ms(self, launches: Sequence[Launch]) -> list[float]:
        """Run launches one after the other, and return the time of each by the device's clock.

        Copies run first, while the launches are enqueued, so the device never waits for a launch.
        """
        self._prepare(launches)
        pair, events = self._pair(_AHEAD_BYTES), [self._event()]
        with self._card, self._stream:
            self._copy_often(pair, _AHEAD_BYTES, _AHEAD_COPIES)
            events[0].record(self._stream)
            for launch in launches:
                self._enqueue(launch)
                events.append(self._event())
                events[-1].record(self._stream)
        return [self._elapsed_ms(*both) for both in pairwise(events)]

    def copy_ms(self, size_bytes: int, times: int) -> float:
        """Return the time of `times` copies within the device, by its clock."""
        pair, first, last = self._pair(size_bytes), self._event(), self._event()
        with self._card, self._stream:
            self._copy_often(pair, size_bytes, 1)
            first.record(self._stream)
            self._copy_often(pair, size_bytes, times)
            last.record(self._stream)
        return self._elapsed_ms(first, last)

    def failure(self, error: Exception) -> EngineFailed | None:
        """Convert a CUDA error to EngineFailed; return None for any other error."""
        if isinstance(error, self._cupy.cuda.runtime.CUDARuntimeError):
            return EngineFailed(f"{self.name}: {error}; restart the worker")
        return None

    def _prepare(self, launches: Sequence[Launch]) -> None:
        with self._card:
            for launch in launches:
                if launch.shared_bytes > _DEFAULT_SHARED_BYTES:
                    self._kernels[launch.kernel].max_dynamic_shared_size_bytes = launch.shared_bytes
                _ = self._kernels[launch.kernel].num_regs  # loads it

    def _enqueue(self, launch: Launch) -> None:
        arguments = (np.int64(launch.structure), np.int32(launch.number))
        self._kernels[launch.kernel](
            (launch.grid,), (launch.threads,), arguments, shared_mem=launch.shared_bytes
        )

    def _pair(self, size_bytes: int) -> tuple["CudaMemory", "CudaMemory"]:
        return self.memory(size_bytes), self.memory(size_bytes)

    def _copy_often(
        self, pair: tuple["CudaMemory", "CudaMemory"], size_bytes: int, times: int
    ) -> None:
        source, target = pair
        runtime, kind = self._cupy.cuda.runtime, self._cupy.cuda.runtime.memcpyDeviceToDevice
        for _ in range(times):
            runtime.memcpyAsync(target.address, source.address, size_bytes, kind, self._stream.ptr)

    def _event(self) -> Any:
        with self._card:
            return self._cupy.cuda.Event()

    def _elapsed_ms(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(first, last))


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Device memory from CuPy; it is freed with the object."""

    pointer: Any

    @property
    def address(self) -> int:
        return int(self.pointer.ptr)


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A captured graph of kernel launches."""

    device: CudaDevice
    captured: Any

    def launch(self) -> "CudaEvent":
        return self.device.run(self.captured)


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """Handle of one launched run of a graph."""

    device: CudaDevice
    event: Any

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except Exception as error:
            raise self.device.failure(error) or error from error
