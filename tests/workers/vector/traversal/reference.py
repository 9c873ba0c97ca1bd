"""One search in NumPy and plain lists: what `steps.py` must do, said a second time.

Slow and simple; tests compare the two byte for byte. The distances are the kernel's own, because a
sum in another order is another number. It keeps every row that it met, where the kernel's table may
forget some: those come again and are dropped as equal, so that results agree and counts may not.
"""

from typing import Any

import numpy as np

from workers.vector.index.plans import PreparedSearch
from workers.vector.kernels.arrays import stored_bits, unpack_bits
from workers.vector.kernels.distances import distance
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.keys import EMPTY, LIMIT, NOWHERE, key_of, rows_and_distances
from workers.vector.kernels.memory import address
from workers.vector.traversal import fields

Array = np.ndarray[Any, Any]


@kernel
def _keys(vectors: Array, rows: Array, query: Array, metric: int, stored: int) -> Array:
    """Keys of rows by their distance to a query."""
    out = np.empty(len(rows), np.uint64)
    for i in range(len(rows)):
        at = address(vectors) + rows[i] * vectors.strides[0]
        far = distance(at, address(query), vectors.shape[1], metric, stored)
        out[i] = key_of(far, rows[i])
    return out


class Reference:
    """A search of the first query of `search`; `run` gives rows and distances of its hits."""

    def __init__(self, search: PreparedSearch) -> None:
        self.view, self.row, self.query = search.view, search.row, search.query[0]
        self.search, self.extends = search, 0
        self.top: list[int] = []  # keys, ascending; their rows' flags are in `expanded`
        self.hit_keys: list[int] = []
        self.expanded: set[int] = set()
        self.met: set[int] = set()

    def run(self) -> tuple[Array, Array]:
        row = self.row
        if row[fields.LIST_COUNT]:
            assert self.search.plan.where is not None
            assert self.search.plan.where.rows is not None
            self._measure(self.search.plan.where.rows, 0)
            return self._hits()
        if row[fields.WARM_COUNT]:
            assert self.search.warm is not None
            self._measure(self.search.warm, int(row[fields.TOP_M]))
        if row[fields.REPS_COUNT]:
            room = max(int(row[fields.ENTRIES]), int(row[fields.WARM_COUNT]))
            nodes = self.view.nodes if row[fields.WHOLE] else None
            self._measure(self.view.seeds if nodes is None else nodes, room)
        self._measure(np.arange(row[fields.LOOSE_FIRST], row[fields.LOOSE_LAST]), 0)
        self.met = {_row(key) for key in self.top}
        if not row[fields.WHOLE]:
            self._walk()
        needed, m = int(row[fields.NEEDED]), int(row[fields.TOP_M])
        if needed and len(self.top) >= m:
            if len(self.hit_keys) < needed or self.hit_keys[needed - 1] > self.top[m - 1]:
                self.hit_keys = []
        return self._hits()

    def _walk(self) -> None:
        row, stable = self.row, 0
        while not row[fields.PATIENCE] or stable < row[fields.PATIENCE]:
            parents = [k for k in self.top if k not in self.expanded][: row[fields.WIDTH]]
            if not parents:
                return
            self.expanded.update(parents)
            edges = [int(e) for key in parents for e in self.view.graph[_row(key)]]
            new = [e for e in dict.fromkeys(edges) if e not in self.met]
            self.met.update(new)
            before = list(self.top)
            self._measure(np.array(new, np.int64), int(row[fields.TOP_M]))
            stable = stable + 1 if self.top == before else 0
            self.extends += 1

    def _measure(self, rows: Array, room: int) -> None:
        view, k = self.view, int(self.row[fields.K])
        keys = _keys(
            stored_bits(view.vectors), rows, self.query, view.metric.number, view.storage.number
        )
        measured = [copy_key for key in keys.tolist() for copy_key in self._copies(key, room)]
        returned = [key for key in measured if self._may_return(_row(key))]
        self.hit_keys = sorted({*self.hit_keys, *returned})[:k]
        if room:
            tail = self.top[room:]
            self.top = sorted({*self.top[:room], *keys.tolist()})[:room] + tail

    def _copies(self, key: int, room: int) -> list[int]:
        """Keys of a row and of those that are equal to it, if it is walked to."""
        out, chain = [key], self.view.chain
        while chain is not None and room and chain[_row(out[-1]), 0] != NOWHERE:
            out.append(key - 2 * _row(key) + 2 * int(chain[_row(out[-1]), 0]))
        return out

    def _may_return(self, row: int) -> bool:
        where, view = self.search.plan.where, self.view
        sets = [view.alive, where.bits if where is not None else None]
        return all(bits is None or bool(unpack_bits(bits, view.count)[row]) for bits in sets)

    def _hits(self) -> tuple[Array, Array]:
        hits = self.hit_keys if self.row[fields.SCREENED] else self.top
        if self.row[fields.CHAIN] and not self.row[fields.SCREENED]:
            hits = sorted(copy_key for key in self.top for copy_key in self._copies(key, 1))
        keys = np.full(int(self.row[fields.K]), EMPTY, np.uint64)
        hits = hits[: len(keys)]
        keys[: len(hits)] = hits
        return hits_of(keys)


def _row(key: int) -> int:
    return (key & 0xFFFFFFFF) >> 1


def hits_of(keys: Array) -> tuple[Array, Array]:
    """Rows and distances of keys; -1 and infinity for empty ones."""
    rows, distances = rows_and_distances(keys)
    empty = keys >= LIMIT
    rows[empty], distances[empty] = -1, np.inf
    return rows, distances
