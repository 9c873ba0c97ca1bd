"""The values of rows beyond their first, for metadata that are lists."""

from collections.abc import Callable
from typing import Any

import numpy as np

from workers.vector.kernels.arrays import Array

ValueTest = Callable[[Array], Array]  # values to bool of the same shape
_CAPACITY_MIN = 64


class ExtraValues:
    """Further values of rows, in order of rows. One thread may add while others read."""

    def __init__(self, rows: Array, values: Array) -> None:
        self._count, self._arrays = len(rows), (rows, values)

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Return rows, int64, and one value for each; a row may occur several times."""
        count, (rows, values) = self._count, self._arrays  # the arrays are replaced, never shorter
        return rows[:count], values[:count]

    @property
    def bytes_held(self) -> int:
        """Return the bytes of both arrays, spare capacity included."""
        return sum(array.nbytes for array in self._arrays)

    def add(self, row: int, value: Any) -> None:
        """Add a value of the last row, or of a later one."""
        rows, values = self._arrays
        if self._count == len(rows):
            capacity = max(_CAPACITY_MIN, 2 * self._count)
            self._arrays = rows, values = np.resize(rows, capacity), np.resize(values, capacity)
        rows[self._count], values[self._count] = row, value
        self._count += 1

    def mark(self, mask: Array, first: int, last: int, matches: ValueTest) -> None:
        """Set `mask`, bool of rows `first` to `last`, for rows with a value that matches."""
        rows, values = self.arrays
        begin, end = np.searchsorted(rows, (first, last))
        mask[rows[begin:end][matches(values[begin:end])] - first] = True

    def take(self, kept_rows: Array) -> "ExtraValues":
        """Return the values of these rows only, renumbered in this order."""
        rows, values = self.arrays
        new = np.full(max(rows.max(initial=-1), kept_rows.max(initial=-1)) + 1, -1)
        new[kept_rows] = np.arange(len(kept_rows))
        order = np.argsort(new[rows], kind="stable")
        order = order[new[rows][order] >= 0]
        return ExtraValues(new[rows][order], values[order])
