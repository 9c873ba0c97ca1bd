"""Versions of graphs and chains on a device: of a new one, only the rows that differ go there.

Theory of operation. As on the host (`graph/versions.py`), two buffers take turns. A version that
somebody may still search keeps its buffer, as long as its array lives. The next goes into one that
nobody reads: the rows in which it differs from the version that lies there are sent, and a kernel
puts them in place. Where all buffers are read, or lack room, a new one begins as a copy of another.
All rows are sent where no version is there that the new one knows of, or half of the rows differ.
There are as many buffers as versions are read, two at least and soon again at most.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workers.search.cuda import layout
from workers.search.cuda.device import Device, Launch, Memory, pinned
from workers.search.graph.versions import Line, Version
from workers.search.kernels.arrays import Array

_ROOM = 8  # a buffer has room for this part more rows than it is made for
_PIECE_WORDS = 1 << 18  # of rows and their numbers, that are sent together
_THREADS, _BLOCKS = 256, 4  # of a block; of a multiprocessor
_HEAD_WORDS = 2 * len(layout.CHANGES)


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Memory
    room: int  # rows
    number: int = -1  # of the version in it
    size_bytes: int = 0  # of that
    reader: weakref.ref[Array] | None = None

    @property
    def is_free(self) -> bool:
        """Nobody can read it any more."""
        return self.reader is None or self.reader() is None


class DeviceVersions:
    """Of any graphs; for one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = weakref.WeakKeyDictionary[Line, list[_Buffer]]()
        self._piece = pinned(device, (_HEAD_WORDS + _PIECE_WORDS,), np.uint32)
        self._sent = device.memory(self._piece.nbytes)

    def __len__(self) -> int:
        return sum(map(len, self._buffers.values()))

    def address(self, version: Version) -> int:
        """Where it is on the device; it stays there, as it is, while its array lives."""
        buffers = self._buffers.setdefault(version.line, [])
        for each in buffers:
            if each.number == version.number:
                return each.memory.address
        return self._placed(version, buffers).memory.address

    def _placed(self, version: Version, buffers: list[_Buffer]) -> _Buffer:
        """The version, in a buffer that nobody reads."""
        array = version.array
        differing: dict[_Buffer, Array] = {}
        for each in buffers:
            rows = version.since(each.number)
            if rows is not None and 2 * len(rows) <= len(array):
                differing[each] = rows
        nearest = min(differing, key=lambda each: len(differing[each]), default=None)
        free = [each for each in buffers if each.is_free and each.room >= len(array)]
        if free:
            buffer = min(free, key=lambda each: len(differing.get(each, array)))
        else:
            buffers[:] = [each for each in buffers if not each.is_free or each is nearest]
            room = len(array) + len(array) // _ROOM
            buffer = _Buffer(self._device.memory(max(1, room * array.strides[0])), room)
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
        for each in [each for each in buffers if each.is_free][: max(0, len(buffers) - 2)]:
            buffers.remove(each)
        return buffer

    def _send(self, array: Array, rows: Array, buffer: _Buffer) -> None:
        """Some rows of an array, to where they belong in a buffer."""
        width = array.shape[1]
        for some in _pieces(rows, max(1, _PIECE_WORDS // (1 + width))):
            words = _HEAD_WORDS + len(some)
            used = words + len(some) * width
            places = {
                "graph": buffer.memory.address, "rows": self._sent.address + 4 * _HEAD_WORDS,
                "words": self._sent.address + 4 * words, "count": len(some), "width": width,
            }  # fmt: skip
            self._piece[:_HEAD_WORDS].view(np.int64)[:] = [places[n] for n in layout.CHANGES]
            self._piece[_HEAD_WORDS:words] = some
            packed = self._piece[words:used].reshape(len(some), width)
            np.take(array, some, axis=0, out=packed, mode="clip")
            self._device.copy(self._sent.address, self._piece.ctypes.data, 4 * used)
            blocks = min(-(-packed.size // _THREADS), _BLOCKS * self._device.multiprocessors)
            self._device.beside(
                Launch(
                    kernel="scatter", grid=blocks, threads=_THREADS, structure=self._sent.address
                )
            )


def _pieces(rows: Array, most: int) -> Iterator[Array]:
    for first in range(0, len(rows), most):
        yield rows[first : first + most]
