"""The rings between host and device: what a turn begins with, and which slots ended in it.

Pinned memory, one entry for each turn under way. An entry is written before its turn is launched
and read after its turn's event, so neither side waits for a flag.
"""

from dataclasses import dataclass

import numpy as np

from workers.search.cuda.device import Device, pinned
from workers.search.kernels.arrays import Array
from workers.search.walk import fields

DEPTH = 2  # turns under way: one runs while the host deals with the one before


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A search on its way into a slot; `row` has addresses of device memory."""

    slot: int
    serial: int  # so that a late end of the search before is not taken for this one's
    row: Array
    query: Array  # float32, padded; empty where a feed has the queries
    warm: Array


class Rings:
    """For `slots` slots, queries of `dim_max` values and warm starts of `top_m_max` rows."""

    def __init__(self, device: Device, slots: int, dim_max: int, top_m_max: int) -> None:
        self.slots, self._warm_at = slots, 2 + fields.COUNT + dim_max // 2
        self.record_words = self._warm_at + top_m_max
        self.into = pinned(device, (DEPTH, 2 + slots + slots * self.record_words), np.int64)
        self.out = pinned(device, (DEPTH, 2 + slots), np.int64)

    def write(self, turn: int, active: list[int], assignments: list[Assignment]) -> None:
        """What the turn begins with; the turn `DEPTH` before must be over."""
        entry = self.into[turn % DEPTH]
        entry[0], entry[1] = len(active), len(assignments)
        entry[2 : 2 + len(active)] = active
        records = entry[2 + self.slots :].reshape(self.slots, self.record_words)
        for record, each in zip(records, assignments, strict=False):
            record[0], record[1] = each.slot, each.serial
            record[2 : 2 + fields.COUNT] = each.row
            first = 2 + fields.COUNT
            record[first : first + len(each.query) // 2] = each.query.view(np.int64)
            record[self._warm_at : self._warm_at + len(each.warm)] = each.warm

    def read(self, turn: int) -> tuple[list[tuple[int, int]], int]:
        """Slots that ended in a turn with their serials, ascending, and its number of tasks."""
        entry = self.out[turn % DEPTH]
        ended = [(each & 0xFFFFFFFF, each >> 32) for each in entry[2 : 2 + entry[0]].tolist()]
        return sorted(ended), int(entry[1])
