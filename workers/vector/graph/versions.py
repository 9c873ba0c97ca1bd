"""Versions of a growing graph: each is immutable, and the next one needs no full copy of it.

Theory of operation. Two buffers with spare capacity alternate ("left-right": Ramalhete and Correia,
2015). Readers use the newest version, which is the first rows of one buffer. The next version is
written to the other buffer, which lacks only the rows of the last change: these are copied, and no
others. If a reader still uses the version before the newest, it keeps that buffer, and all rows are
copied to a new one. The same happens after a version that was begun but never published. There is
one writer at a time.

A version records the rows of the last changes, for the owners of copies of earlier versions.
"""

import weakref
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from workers.vector.kernels.arrays import Array, aligned
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address, prefetch_row

CHANGES_MAX = 8  # changes that a version records
_NO_ROWS: Array = np.empty(0, np.int64)
_AHEAD = 8  # rows that are prefetched
_numbers = count()


class Lineage:
    """The identity of a graph, which its versions share; it lives as long as one of them."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class GraphVersion:
    """One version of a graph; by default the first."""

    array: Array  # uint32 (rows, degree); never written to
    lineage: Lineage = field(default_factory=Lineage)
    number: int = field(default_factory=lambda: next(_numbers))  # unique among all versions
    # the last changes: number of the version before, and rows that differ or are missing in it
    changes: tuple[tuple[int, Array], ...] = ()

    def since(self, number: int) -> Array | None:
        """Return rows that may differ from an earlier version, some twice; None: not recorded."""
        before = [old_number for old_number, _ in self.changes]
        if number not in before:
            return None
        return np.concatenate([rows for _, rows in self.changes[before.index(number) :]])


class GraphVersions:
    """Hold the versions of one graph, from its first one on."""

    def __init__(self, first: GraphVersion) -> None:
        self.newest = first
        self._buffer = first.array  # the buffer of the newest version
        self._spare: Array | None = None
        self._reader: weakref.ref[Array] | None = None  # the version in the spare buffer
        self._stale_rows = _NO_ROWS  # rows in which the spare buffer differs
        self._draft: tuple[Array, Array] | None = None  # a buffer, and the next version in it

    @property
    def bytes_held(self) -> int:
        """Return the memory of both buffers in bytes."""
        spare = self._spare
        return self._buffer.nbytes + (0 if spare is None else spare.nbytes)

    def begin(self, rows: int) -> Array:
        """Return the array of the next version to write: the newest one's rows, then unset ones."""
        newest, spare = self.newest.array, self._spare
        is_read = self._reader is not None and self._reader() is not None
        self._spare = None
        if spare is None or len(spare) < rows or is_read:
            spare = aligned(rows + rows // 2, newest.shape[1], np.uint32)
            spare[: len(newest)] = newest
        else:
            _copy(newest, spare, self._stale_rows)
        self._draft = spare, spare[:rows]
        return self._draft[1]

    def seal(self, changed: Array) -> GraphVersion:
        """Return the version that was begun; `changed` are its rows that differ from the newest."""
        assert self._draft is not None, "begun first"
        newest, array = self.newest, self._draft[1]
        rows = np.concatenate([changed, np.arange(len(newest.array), len(array))])
        changes = (*newest.changes, (newest.number, rows))[-CHANGES_MAX:]
        return GraphVersion(array, newest.lineage, changes=changes)

    def publish(self, version: GraphVersion) -> None:
        """Make the version that was written the newest."""
        assert self._draft is not None, "begun first"
        assert version.array is self._draft[1], "the version that was begun last"
        self._stale_rows = version.changes[-1][1]
        self._spare, self._reader = self._buffer, weakref.ref(self.newest.array)
        self._buffer, self.newest, self._draft = self._draft[0], version, None


@kernel
def _copy(source: Array, target: Array, rows: Array) -> None:
    """Copy some rows, int64, of one graph to another; both are uint32 (rows, degree)."""
    row_bytes = source.strides[0]
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch_row(address(source) + rows[i + _AHEAD] * row_bytes, row_bytes)
            prefetch_row(address(target) + rows[i + _AHEAD] * row_bytes, row_bytes)
        for place in range(source.shape[1]):
            target[rows[i], place] = source[rows[i], place]
