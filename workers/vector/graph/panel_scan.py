"""Scans for the nearest rows, with distances of sixteen rows at a time.

It is for rows that are short enough for panels (`kernels/panels.py`).
"""

from typing import Any

import numpy as np

from workers.vector.graph.exact import dims_used
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.jit import inlined, kernel
from workers.vector.kernels.keys import (
    EMPTY,
    LIMIT,
    distance_of,
    insert,
    key_of,
    rows_and_distances,
)
from workers.vector.kernels.memory import address
from workers.vector.kernels.panels import PANEL_ROWS, measure, panels, within
from workers.vector.kernels.parallel import over_rows
from workers.vector.kernels.products import lowest

_BLOCK = 64  # panels that all queries are compared with while they are in the cache


class PanelScan:
    """Rows of `vectors`, shape (rows, padded dim), of at most PANEL_DIM_MAX values."""

    def __init__(self, vectors: Array, metric: int, *, threads: int = 0) -> None:
        self._vectors, self._metric, self._threads = vectors, metric, threads
        self._panels = panels(vectors, dims_used(vectors))

    def nearest(self, rows: Array, count: int) -> Array:
        """Return the rows nearest to each of `rows`, int64, without these: int64 (rows, count).

        There must be at least `count` other rows.
        """
        panels, vectors = self._panels, self._vectors
        hidden = np.zeros(len(panels) * PANEL_ROWS, bool)
        hidden[rows] = hidden[len(vectors) :] = True
        keys = np.full((len(rows), count), EMPTY, np.uint64)
        queries = np.ascontiguousarray(vectors[rows], np.float32)
        over_rows(
            _scan, len(rows), queries, panels, hidden, keys, self._metric, threads=self._threads
        )
        nearest_rows: Array = rows_and_distances(keys)[0]
        return nearest_rows


@kernel
def _scan(
    first: int, last: int, queries: Array, panels: Array, hidden: Array, keys: Array, metric: int
) -> None:
    """Insert rows that are not `hidden`, bool, into the lists of queries `first` to `last`.

    `queries` are float32 (queries, padded dim), `panels` float32 (panels, dims, PANEL_ROWS), and
    `keys` uint64 (queries, count).
    """
    distances = np.empty(_BLOCK * PANEL_ROWS, np.float32)
    for panel in range(0, len(panels), _BLOCK):
        size, base = min(_BLOCK, len(panels) - panel), panel * PANEL_ROWS
        at = address(panels) + panel * panels.strides[0]
        for i in range(first, last):
            query = address(queries) + i * queries.strides[0]
            measure(at, size, query, panels.shape[1], metric, address(distances))
            list_address, limit = address(keys) + i * keys.strides[0], _limit(keys[i, -1])
            for first_row in range(0, size * PANEL_ROWS, PANEL_ROWS):
                bits = within(address(distances) + 4 * first_row, limit)
                while bits != np.uint32(0):
                    j = first_row + lowest(bits)
                    bits &= bits - np.uint32(1)
                    if not hidden[base + j]:
                        insert(list_address, keys.shape[1], key_of(distances[j], base + j))
                        limit = _limit(keys[i, -1])


@inlined
def _limit(last: Any) -> Any:
    """Return the largest distance of a row that fits into a list with this last key."""
    return np.float32(np.inf) if last >= LIMIT else distance_of(last)
