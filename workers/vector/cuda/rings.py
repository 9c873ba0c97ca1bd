"""The rings between host and device: the input of a turn, and the slots that ended in it.

They are in pinned memory, with one entry for each turn in flight. An entry is written before its
turn is launched and read after its turn's event, so neither side waits for a flag.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from workers.vector.cuda.device import Device, pinned_array
from workers.vector.kernels.arrays import Array, address_of
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address, get_i64, put_i64
from workers.vector.traversal import fields

DEPTH = 2  # turns in flight: one runs while the host handles the one before


class Assignment(NamedTuple):
    """The assignment of a search to a slot; `row` has addresses of device memory."""

    slot: int
    serial: int  # distinguishes this search's end from a late end of the one before
    row: Array
    query: Array  # float32, padded; empty if a feed has the queries
    warm: Array


class Rings:
    """Rings for `slots` slots, queries of `dim_max` values and warm starts of `top_m_max` rows."""

    def __init__(self, device: Device, slots: int, dim_max: int, top_m_max: int) -> None:
        self.slots, self._warm_at = slots, 2 + fields.COUNT + dim_max // 2
        self.record_words = self._warm_at + top_m_max
        self.into = pinned_array(device, (DEPTH, 2 + slots + slots * self.record_words), np.int64)
        self.out = pinned_array(device, (DEPTH, 2 + slots), np.int64)
        self._records = [address_of(entry[2 + slots :]) for entry in self.into]
        row, nothing = np.zeros(fields.COUNT, np.int64), np.empty(0, np.int64)
        self.write(0, [], [Assignment(0, 0, row, np.empty(0, np.float32), nothing)])  # compile it

    def write(self, turn: int, active: list[int], assignments: Iterable[Assignment]) -> None:
        """Write the input of a turn; the turn `DEPTH` before must be over."""
        entry, record, count = self.into[turn % DEPTH], self._records[turn % DEPTH], 0
        for assignment in assignments:
            _write(record + 8 * self.record_words * count, 8 * self._warm_at, *assignment)
            count += 1
        entry[0], entry[1] = len(active), count
        entry[2 : 2 + len(active)] = active

    def read(self, turn: int) -> tuple[list[tuple[int, int]], int]:
        """Return the slots that ended in a turn with their serials, ascending, and its tasks."""
        entry = self.out[turn % DEPTH]
        endings = [(word & 0xFFFFFFFF, word >> 32) for word in entry[2 : 2 + entry[0]].tolist()]
        return sorted(endings), int(entry[1])


@kernel
def _write(
    record: int, warm_at: int, slot: int, serial: int, row: Array, query: Array, warm: Array
) -> None:
    """Fill in the record at an address; `warm_at` is the offset of its warm start."""
    put_i64(record, 0, slot)
    put_i64(record, 1, serial)
    for field in range(fields.COUNT):
        put_i64(record, 2 + field, row[field])
    put_i64(record, 2 + fields.WARM_COUNT, len(warm))
    values = address(query)
    for i in range(len(query) // 2):
        put_i64(record, 2 + fields.COUNT + i, get_i64(values, i))
    for i in range(len(warm)):
        put_i64(record + warm_at, i, warm[i])
