"""Values of rows beyond their first: of those whose metadata have lists."""

from collections.abc import Callable
from typing import Any

import numpy as np

from workers.search.kernels.arrays import Array

ValueTest = Callable[[Array], Array]  # for which of some values, bool
_CAPACITY_MIN = 64


class ExtraValues:
    """Values of rows beyond their first, in order of rows. One thread adds while others read."""

    def __init__(self, rows: Array, values: Array) -> None:
        self._count, self._arrays = len(rows), (rows, values)

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Rows, int64, and a value of each."""
        count, (rows, values) = self._count, self._arrays  # the arrays are replaced, never shorter
        return rows[:count], values[:count]

    @property
    def bytes_held(self) -> int:
        """Memory, with room for more."""
        return sum(array.nbytes for array in self._arrays)

    def add(self, row: int, value: Any) -> None:
        """One more value of the last row, or of one behind it."""
        rows, values = self._arrays
        if self._count == len(rows):
            capacity = max(_CAPACITY_MIN, 2 * self._count)
            self._arrays = rows, values = np.resize(rows, capacity), np.resize(values, capacity)
        rows[self._count], values[self._count] = row, value
        self._count += 1

    def mark(self, mask: Array, first: int, last: int, matches: ValueTest) -> None:
        """Set `found`, bool of rows `first` to `last`, where it holds for one of these values."""
        rows, values = self.arrays
        begin, end = np.searchsorted(rows, (first, last))
        mask[rows[begin:end][matches(values[begin:end])] - first] = True

    def take(self, kept_rows: Array) -> "ExtraValues":
        """The same for these rows only, renumbered in this order."""
        rows, values = self.arrays
        new = np.full(max(rows.max(initial=-1), kept_rows.max(initial=-1)) + 1, -1)
        new[kept_rows] = np.arange(len(kept_rows))
        order = np.argsort(new[rows], kind="stable")
        order = order[new[rows][order] >= 0]
        return ExtraValues(new[rows][order], values[order])
