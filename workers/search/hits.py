"""Reads what a slot that is done has found. One kernel call: NumPy would take ten times as long."""

from typing import Any

import numpy as np

from workers.search import fields
from workers.search.compiled import kernel
from workers.search.keys import EMPTY, FLAG, distance_of, row_of
from workers.search.memory import get_i64, get_u64, put_f32, put_i64
from workers.search.slots import Slots

Array = np.ndarray[Any, Any]

_LIMIT = EMPTY - FLAG


class Reader:
    """Room to read the hits of some slots into."""

    def __init__(self, slots: Slots) -> None:
        self.rows, self.distances = np.empty(slots.k_max, np.int64), np.empty(slots.k_max, "f4")
        self._counts = np.empty(5, np.int64)
        each = (slots.fields, slots.top, slots.found)
        self._places = [
            tuple(int(array[slot].ctypes.data) for array in each) for slot in range(slots.count)
        ]
        self._room = tuple(int(a.ctypes.data) for a in (self.rows, self.distances, self._counts))
        self.read(0)  # compile here, not in somebody's event loop

    def read(self, slot: int) -> list[int]:
        """Hits (then they are in `rows` and `distances`), routing entries, extends, distances
        computed, and whether nothing was walked."""
        _read(*self._places[slot], *self._room)
        counts: list[int] = self._counts.tolist()
        return counts


@kernel
def _read(f: int, keys: int, found: int, rows: int, distances: int, counts: int) -> None:
    entries, k, hits = 0, get_i64(f, fields.K), 0
    while entries < get_i64(f, fields.TOP_M) and get_u64(keys, entries) < _LIMIT:
        entries += 1
    source, most = (found, k) if get_i64(f, fields.SCREENED) else (keys, min(k, entries))
    while hits < most and get_u64(source, hits) < _LIMIT:
        put_i64(rows, hits, row_of(get_u64(source, hits)))
        put_f32(distances, hits, distance_of(get_u64(source, hits)))
        hits += 1
    put_i64(counts, 0, hits)
    put_i64(counts, 1, entries)
    put_i64(counts, 2, get_i64(f, fields.EXTENDS))
    put_i64(counts, 3, get_i64(f, fields.DISTANCES))
    put_i64(counts, 4, 1 if get_i64(f, fields.REPS_COUNT) == 0 else 0)
