"""Versions of a graph that grows: each stays as it is, and the next takes no copy of it.

Theory of operation. Two buffers with room for more rows take turns ("left-right": Ramalhete and
Correia, 2015). Readers hold the newest version, the first rows of one. The next is written in the
other, which lags behind by what the last change wrote: those rows are copied, and no others. Who
still reads the version before the newest keeps its buffer, and all rows are copied to a new one.
The same holds after a version that was begun and not published. One writer at a time.
"""

import weakref

import numpy as np

from workers.search.kernels.arrays import Array

_NO_ROWS: Array = np.empty(0, np.int64)


class Versions:
    """Of one graph, uint32 (rows, degree)."""

    def __init__(self, graph: Array) -> None:
        self.newest = graph  # nobody writes to it
        self._buffer = graph  # where it begins
        self._other: Array | None = None
        self._reader: weakref.ref[Array] | None = None  # the version that lies in the other
        self._behind = _NO_ROWS  # rows in which the other differs
        self._begun: Array | None = None

    @property
    def bytes_held(self) -> int:
        """Of both buffers."""
        other = self._other
        return self._buffer.nbytes + (0 if other is None else other.nbytes)

    def begun(self, rows: int) -> Array:
        """The next version, to be written: as the newest one, with rows that are not set yet."""
        newest, other = self.newest, self._other
        is_read = self._reader is not None and self._reader() is not None
        self._other = None
        if other is None or len(other) < rows or is_read:
            other = np.empty((rows + rows // 2, newest.shape[1]), np.uint32)
            other[: len(newest)] = newest
        else:
            other[self._behind] = newest[self._behind]
        self._begun = other
        return other[:rows]

    def publish(self, version: Array, changed: Array) -> None:
        """The version that was begun is the newest; `changed` are rows that the former had, too."""
        assert self._begun is not None, "begun first"
        came = np.arange(len(self.newest), len(version))
        self._behind = np.concatenate([changed, came])
        self._other, self._reader = self._buffer, weakref.ref(self.newest)
        self._buffer, self.newest = self._begun, version
