"""Versions of a graph that grows: each stays as it is, and the next takes no copy of it.

Theory of operation. Two buffers with room for more rows take turns ("left-right": Ramalhete and
Correia, 2015). Readers hold the newest version, the first rows of one. The next is written in the
other, which lags behind by what the last change wrote: those rows are copied, and no others. Who
still reads the version before the newest keeps its buffer, and all rows are copied to a new one.
The same holds after a version that was begun and not published. One writer at a time.

A version knows the rows that the last changes wrote, for whoever has a copy of an earlier one.
"""

import weakref
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from workers.search.kernels.arrays import Array, aligned
from workers.search.kernels.jit import kernel
from workers.search.kernels.memory import address, prefetch_row

CHANGES_MAX = 8  # that a version remembers
_NO_ROWS: Array = np.empty(0, np.int64)
_AHEAD = 8  # rows that are on their way from memory
_numbers = count()


class Line:
    """What versions of one graph have in common; it lives as long as one of them."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """Of a graph; by default the first one."""

    array: Array  # uint32 (rows, degree); nobody writes to it
    line: Line = field(default_factory=Line)
    number: int = field(default_factory=lambda: next(_numbers))  # no other version has it
    # the last changes: the number of the version before, and rows that were other in it, or missing
    changes: tuple[tuple[int, Array], ...] = ()

    def since(self, number: int) -> Array | None:
        """Rows in which it may differ from an earlier version, some twice; None: it forgot that."""
        before = [each for each, _ in self.changes]
        if number not in before:
            return None
        return np.concatenate([rows for _, rows in self.changes[before.index(number) :]])


class Versions:
    """Of one graph, from its first version on."""

    def __init__(self, first: Version) -> None:
        self.newest = first
        self._buffer = first.array  # where it begins
        self._other: Array | None = None
        self._reader: weakref.ref[Array] | None = None  # the version that lies in the other
        self._behind = _NO_ROWS  # rows in which the other differs
        self._begun: tuple[Array, Array] | None = None  # a buffer, and the version in it

    @property
    def bytes_held(self) -> int:
        """Of both buffers."""
        other = self._other
        return self._buffer.nbytes + (0 if other is None else other.nbytes)

    def begun(self, rows: int) -> Array:
        """The next version, to be written: as the newest one, with rows that are not set yet."""
        newest, other = self.newest.array, self._other
        is_read = self._reader is not None and self._reader() is not None
        self._other = None
        if other is None or len(other) < rows or is_read:
            other = aligned(rows + rows // 2, newest.shape[1], np.uint32)
            other[: len(newest)] = newest
        else:
            _copy(newest, other, self._behind)
        self._begun = other, other[:rows]
        return self._begun[1]

    def written(self, changed: Array) -> Version:
        """The version that was begun; `changed` are rows of it that the newest one has, too."""
        assert self._begun is not None, "begun first"
        newest, array = self.newest, self._begun[1]
        rows = np.concatenate([changed, np.arange(len(newest.array), len(array))])
        changes = (*newest.changes, (newest.number, rows))[-CHANGES_MAX:]
        return Version(array, newest.line, changes=changes)

    def publish(self, version: Version) -> None:
        """What was written is the newest."""
        assert self._begun is not None, "begun first"
        assert version.array is self._begun[1], "the version that was begun last"
        self._behind = version.changes[-1][1]
        self._other, self._reader = self._buffer, weakref.ref(self.newest.array)
        self._buffer, self.newest, self._begun = self._begun[0], version, None


@kernel
def _copy(source: Array, target: Array, rows: Array) -> None:
    """Some rows, int64, of one graph to another; both are uint32 (rows, degree)."""
    row_bytes = source.strides[0]
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch_row(address(source) + rows[i + _AHEAD] * row_bytes, row_bytes)
            prefetch_row(address(target) + rows[i + _AHEAD] * row_bytes, row_bytes)
        for place in range(source.shape[1]):
            target[rows[i], place] = source[rows[i], place]
