"""The state of running searches: one row of each array per slot, for the CPU.

A slot is FREE, SEEDING (rows from lists: entry points, a warm start, rows without edges, or all
that a filter allows), WALKING (expanding the graph), DONE or PARKED. A parked slot keeps its state
and is not stepped, so taking a slot away from a search for a while costs it nothing but time. All
that a step needs to know of an index stands in the slot as addresses: searches of several indexes,
and of several snapshots of one, share a batch. `steps.py` advances slots; `engine.py` fills them
and keeps what they point to alive.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from workers.search.keys import EMPTY

Array = np.ndarray[Any, Any]


class Status(IntEnum):
    """Where a slot is."""

    FREE = 0
    SEEDING = 1
    WALKING = 2
    DONE = 3
    PARKED = 4


class Field(IntEnum):
    """Columns of `Slots.fields`, int64."""

    STATUS = 0
    PARKED_FROM = 1  # the status to go back to
    TOP_M = 2
    WIDTH = 3
    K = 4
    PATIENCE = 5  # 0: stop when no entry is left to expand
    ENTRIES = 6  # how many representatives the walk begins at
    HASH_MASK = 7
    # progress
    NEXT = 8  # no entry before this one is left to expand
    STABLE = 9  # extends since the top list changed
    EXTENDS = 10
    DISTANCES = 11
    LIST_DONE = 12
    WARM_DONE = 13
    REPS_DONE = 14
    LOOSE_DONE = 15
    # the index
    VECTORS = 16
    ROW_BYTES = 17
    LENGTH = 18
    METRIC = 19
    STORED = 20
    GRAPH = 21
    DEGREE = 22
    ALIVE = 23  # bit set of rows that may be returned; 0: all
    LOOSE_FIRST = 24  # rows that have no edges yet
    LOOSE_LAST = 25
    REPS = 26
    REPS_COUNT = 27
    # the request
    ALLOWED = 28  # bit set; 0: all
    LIST = 29  # scan these rows and nothing else
    LIST_COUNT = 30
    WARM = 31
    WARM_COUNT = 32
    SCREENED = 33  # whether `found` is kept, because not every row may be returned


FIELDS = len(Field)
ROWS_A_STEP = 64  # of the lists that a seeding slot works through


class Slots:
    """Room for `count` searches with at most `top_m_max` routing entries and `k_max` results."""

    def __init__(self, count: int, *, length_max: int, top_m_max: int, k_max: int) -> None:
        self.count, self.top_m_max, self.k_max = count, top_m_max, k_max
        self.length_max = length_max
        self.fields: Array = np.zeros((count, FIELDS), np.int64)
        self.queries: Array = np.zeros((count, length_max), np.float32)
        self.top: Array = np.full((count, top_m_max), EMPTY, np.uint64)
        self.found: Array = np.full((count, k_max), EMPTY, np.uint64)  # what may be returned
        self.visited: Array = np.full((count, hash_places(top_m_max)), 0xFFFFFFFF, np.uint32)


def hash_places(top_m: int) -> int:
    """Size of the visited table of a search: a power of two, about a third full at its end.

    No step may add more than half of the places: width times degree is at most 1 024.
    """
    return 1 << max(11, (top_m * 96 - 1).bit_length())
