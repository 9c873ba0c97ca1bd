"""The state of running searches: one row of each array per slot, for the CPU.

A slot is FREE, FRESH (its row is filled in, its lists are not cleared yet), SEEDING (it measures
rows of lists: entry points, a warm start, rows without edges, or all rows that a filter allows),
WALKING (it expands the graph) or DONE. A parked slot is left out of steps by the caller and keeps
its state, so it loses only time. A slot refers to an index by addresses: searches of several
indexes, and of several views of one, share a batch. `steps.py` advances slots; the caller that
fills a slot keeps the memory that it points to alive.
"""

import numpy as np

from workers.vector.kernels.arrays import Array, aligned, row_addresses
from workers.vector.kernels.codes import CODED_QUERY_BYTES
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address, get_i64, put_i64
from workers.vector.limits import TASKS_MAX
from workers.vector.traversal import fields

ROWS_A_STEP = 256  # rows that a seeding slot measures in a step; whole panels
_APART = 64  # bytes between slots: strides of powers of two would share cache sets


class SlotRows:
    """The part of slots that both backends have: a row each, and the lists of results.

    `fields` is int64, shape (count, fields.COUNT). `top`, the routing lists, and `hit_keys`, the
    hits if the routing list does not have them, are uint64 keys, ascending, a row for each slot.
    """

    def __init__(self, top: Array, hit_keys: Array) -> None:
        self.count, self.top, self.hit_keys = len(top), top, hit_keys
        self.fields: Array = np.zeros((self.count, fields.COUNT), np.int64)
        self.addresses = row_addresses(self.fields)


class CpuSlots(SlotRows):
    """Slots for `count` searches on cores, of at most `top_m_max` routing entries and `k_max` hits.

    `visited` is uint32, a hash table of rows that a walk has met; `tasks` is int64, the rows that a
    slot is about to measure, then its coded query (`codes.py`).
    """

    def __init__(self, count: int, *, top_m_max: int, k_max: int) -> None:
        # A search clears the parts that it uses, so unused capacity takes no physical memory.
        super().__init__(
            np.empty((count, top_m_max + _APART // 8), np.uint64),
            np.empty((count, k_max + _APART // 8), np.uint64),
        )
        self.visited: Array = np.empty((count, hash_places(top_m_max) + _APART // 4), np.uint32)
        self.tasks: Array = aligned(count, TASKS_MAX + -(-CODED_QUERY_BYTES // 8), np.int64)
        self.attention: Array = np.zeros(1, np.int64)  # not 0: `advance` ends after an extend


def hash_places(top_m: int) -> int:
    """Return the size of a visited table: a power of two, about a third full after a search."""
    return 1 << max(9, (top_m * 96 - 1).bit_length())


@kernel
def fill(row: int, template: int, query: Array, warm: int, warm_count: int) -> None:
    """Copy a template to a slot's row, for a search of the first row of `query`, float32.

    `row` and `template` are addresses of `fields.COUNT` int64, `warm` of `warm_count` int64.
    """
    for field in range(fields.COUNT):
        put_i64(row, field, get_i64(template, field))
    put_i64(row, fields.QUERY, address(query))
    put_i64(row, fields.WARM, warm)
    put_i64(row, fields.WARM_COUNT, warm_count)
