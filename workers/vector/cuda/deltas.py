"""Versions of graphs and chains on a device: only the rows that differ are sent there.

Theory of operation. As on the host (`graph/versions.py`), two buffers alternate. A version that may
still be searched keeps its buffer while its array lives. The next version goes into a free buffer:
the rows that differ from the buffer's version are sent, and a kernel puts them in place. If all
buffers are in use, or lack room, a new one begins as a copy of another. All rows are sent if no
version on the device is recorded in the new one's changes, or if more than half of the rows differ.
There are as many buffers as versions in use, at least two; the next version frees spare ones.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workers.vector.cuda import layout
from workers.vector.cuda.device import Device, DeviceMemory, Launch, pinned_array
from workers.vector.graph.versions import GraphVersion, Lineage
from workers.vector.kernels.arrays import Array

_ROOM = 8  # a buffer has room for one part in this many more rows than its first version
_PIECE_WORDS = 1 << 18  # of rows and their numbers that are sent together
_THREADS, _BLOCKS = 256, 4  # threads of a block; blocks of a multiprocessor
_HEAD_WORDS = 2 * len(layout.CHANGES)


@dataclass(slots=True, eq=False)
class _GpuBuffer:
    memory: DeviceMemory
    capacity: int  # rows
    number: int = -1  # of the version in it
    size_bytes: int = 0  # of the version in it
    reader: weakref.ref[Array] | None = None

    @property
    def is_free(self) -> bool:
        """Return whether no search can read the buffer any more."""
        return self.reader is None or self.reader() is None


class DeviceVersions:
    """The versions of graphs and chains on a device; for one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = weakref.WeakKeyDictionary[Lineage, list[_GpuBuffer]]()
        self._piece = pinned_array(device, (_HEAD_WORDS + _PIECE_WORDS,), np.uint32)
        self._staging = device.memory(self._piece.nbytes)

    def __len__(self) -> int:
        return sum(map(len, self._buffers.values()))

    def address(self, version: GraphVersion) -> int:
        """Return a version's device address, which stays valid while the version's array lives."""
        buffers = self._buffers.setdefault(version.lineage, [])
        for buffer in buffers:
            if buffer.number == version.number:
                return buffer.memory.address
        return self._place(version, buffers).memory.address

    def _place(self, version: GraphVersion, buffers: list[_GpuBuffer]) -> _GpuBuffer:
        """Put a version into a free buffer, or a new one, and return it."""
        array = version.array
        differing: dict[_GpuBuffer, Array] = {}
        for candidate in buffers:
            rows = version.since(candidate.number)
            if rows is not None and 2 * len(rows) <= len(array):
                differing[candidate] = rows
        nearest = min(differing, key=lambda candidate: len(differing[candidate]), default=None)
        free = [buffer for buffer in buffers if buffer.is_free and buffer.capacity >= len(array)]
        if free:
            buffer = min(free, key=lambda candidate: len(differing.get(candidate, array)))
        else:
            buffers[:] = [buffer for buffer in buffers if not buffer.is_free or buffer is nearest]
            capacity = len(array) + len(array) // _ROOM
            buffer = _GpuBuffer(self._device.memory(max(1, capacity * array.strides[0])), capacity)
            buffers.append(buffer)
        if buffer in differing:
            self._send(array, differing[buffer], buffer)
        elif nearest is not None:
            address = nearest.memory.address
            self._device.copy(buffer.memory.address, address, nearest.size_bytes)
            self._send(array, differing[nearest], buffer)
        elif array.nbytes:
            self._device.copy(buffer.memory.address, array.ctypes.data, array.nbytes)
        buffer.number, buffer.size_bytes = version.number, array.nbytes
        buffer.reader = weakref.ref(array)
        for spare in [old for old in buffers if old.is_free][: max(0, len(buffers) - 2)]:
            buffers.remove(spare)
        return buffer

    def _send(self, array: Array, rows: Array, buffer: _GpuBuffer) -> None:
        """Send some rows of an array to their places in a buffer."""
        width = array.shape[1]
        for part in _pieces(rows, max(1, _PIECE_WORDS // (1 + width))):
            words = _HEAD_WORDS + len(part)
            used = words + len(part) * width
            places = {
                "graph": buffer.memory.address, "rows": self._staging.address + 4 * _HEAD_WORDS,
                "words": self._staging.address + 4 * words, "count": len(part), "width": width,
            }  # fmt: skip
            self._piece[:_HEAD_WORDS].view(np.int64)[:] = [places[n] for n in layout.CHANGES]
            self._piece[_HEAD_WORDS:words] = part
            packed = self._piece[words:used].reshape(len(part), width)
            np.take(array, part, axis=0, out=packed, mode="clip")
            self._device.copy(self._staging.address, self._piece.ctypes.data, 4 * used)
            blocks = min(-(-packed.size // _THREADS), _BLOCKS * self._device.multiprocessors)
            self._device.run_now(
                Launch(
                    kernel="scatter", grid=blocks, threads=_THREADS, structure=self._staging.address
                )
            )


def _pieces(rows: Array, piece_rows: int) -> Iterator[Array]:
    for first in range(0, len(rows), piece_rows):
        yield rows[first : first + piece_rows]
