"""Part of the GPU search benchmark: the time of each kernel, and the memory bandwidth of walks.

Launches the kernels of a turn one by one, and reads the device's clock between them. The kernel
`walk` reads one vector for each distance. Its bytes per second are compared with those of a memory
copy on the same card, where each byte counts as read and as written. Rows that are read from the
card's caches count too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infra.bench.results import median
from workers.vector.cuda import feeds
from workers.vector.cuda.batch import BatchSettings, DeviceBatch
from workers.vector.cuda.device import Device, DeviceMemory, Launch
from workers.vector.index import inputs
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.kernels.arrays import Array

_COPY_BYTES, _COPIES, _COPY_REPEATS = 1 << 28, 8, 5
_QUERIES_OF_A_PLACE = 4


class Stopwatch(Device, Protocol):
    """A device with its own clock."""

    name: str

    def times_ms(self, launches: Sequence[Launch]) -> list[float]:
        """Run the launches one after the other and return the ms of each."""

    def copy_ms(self, size_bytes: int, times: int) -> float:
        """Return the ms of `times` copies of `size_bytes` within the device."""


class TimedDevice:
    """Wraps a device so that its graphs run kernel by kernel, each timed."""

    def __init__(self, device: Stopwatch) -> None:
        self._device, self.multiprocessors = device, device.multiprocessors
        self.taken_ms: dict[str, list[float]] = {}

    def memory(self, size_bytes: int) -> DeviceMemory:
        return self._device.memory(size_bytes)

    def pinned(self, size_bytes: int) -> Array:
        return self._device.pinned(size_bytes)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._device.copy(target, source, size_bytes)

    def run_now(self, launch: Launch) -> None:
        self._device.run_now(launch)

    def graph(self, launches: Sequence[Launch]) -> "TimedGraph":
        return TimedGraph(self, tuple(launches))

    def run(self, launches: Sequence[Launch]) -> None:
        """Launch these kernels one by one and record their times."""
        for launch, took_ms in zip(launches, self._device.times_ms(launches), strict=True):
            self.taken_ms.setdefault(launch.kernel, []).append(took_ms)


@dataclass(frozen=True, slots=True)
class TimedGraph:
    """A graph whose launches run one by one instead of being captured."""

    device: TimedDevice
    launches: tuple[Launch, ...]

    def launch(self) -> "TimedGraph":
        self.device.run(self.launches)
        return self

    def wait(self) -> None:
        """Return at once: each launch has already ended."""


def kernels(
    device: Stopwatch, settings: BatchSettings, index: Index, queries: Array, effort: Effort
) -> dict[str, Any]:
    """Run part 4: microseconds by kernel with all places in use, and bandwidths in GB/s."""
    copied_ms = [device.copy_ms(_COPY_BYTES, _COPIES) for _ in range(_COPY_REPEATS)]
    copied = [2 * _COPY_BYTES * _COPIES / ms / 1e6 for ms in copied_ms]
    timed, view = TimedDevice(device), index.view()
    batch = DeviceBatch(timed, settings)
    some = queries[: _QUERIES_OF_A_PLACE * batch.places]
    feeds.search_all(batch, effort, inputs.prepare(some, view.dim, view.metric), view)
    walked_ms = sum(timed.taken_ms["walk"])
    total_ms = sum(map(sum, timed.taken_ms.values()))
    read_gb_per_s = batch.tasks * view.vectors.strides[0] / walked_ms / 1e6
    copy_gb_per_s = median(copied) or 0.0
    return {
        "by_kernel": {
            name: {
                "launches": len(times_ms), "us_p50": 1_000 * (median(times_ms) or 0.0),
                "us_max": 1_000 * max(times_ms), "share": sum(times_ms) / total_ms,
            }
            for name, times_ms in timed.taken_ms.items()
        },
        "extends": batch.extends, "places": batch.places, "distances": batch.tasks,
        "us_per_extend": 1_000 * total_ms / batch.extends,
        "read_gb_per_s": read_gb_per_s, "copy_gb_per_s": copy_gb_per_s,
        "read_of_copy": read_gb_per_s / copy_gb_per_s,
    }  # fmt: skip
