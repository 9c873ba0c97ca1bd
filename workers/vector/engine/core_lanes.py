"""Starts the engine's threads that run slots; `lane_loop.py` has their loop.

A lane owns some of the engine's slots. Its thread is in one kernel call from start to end and never
takes the interpreter's lock, so it neither blocks other threads nor waits for a busy event loop.
The owner sends commands and collects ended slots from one thread.
"""

import os
import threading

import numpy as np

from schemas.errors import ConfigError
from workers.vector.engine import lane_loop
from workers.vector.engine.lanes import LaneStats, run_as_batch_job
from workers.vector.index.plans import PreparedSearch
from workers.vector.kernels.arrays import address_of, row_addresses
from workers.vector.limits import CORES_DIM_MAX, TASKS_MAX, TOP_M_MAX
from workers.vector.traversal import fields
from workers.vector.traversal.slots import CpuSlots


class CoreLanes:
    """`Lanes` of `count` threads, which share `slots` evenly; raises ConfigError.

    Each thread advances up to `places` slots together.
    """

    backend, dim_max, tasks_max, top_m_max = "cpu", CORES_DIM_MAX, TASKS_MAX, TOP_M_MAX
    feed_queries = 8  # few, so that other searches get the place soon

    def __init__(
        self, slots: CpuSlots, count: int, *, places: int, extends_max: int, name: str
    ) -> None:
        self.count, self.feeds, self.slots_each = count, count, slots.count // count
        if self.slots_each & (self.slots_each - 1):
            raise ConfigError(
                f"engine.slots: expected a power of two for each lane, found {self.slots_each}"
            )
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.failure: BaseException | None = None
        self._slots, self._sizes = slots, (places, extends_max)
        self._bells = [os.eventfd(0) for _ in range(count)]
        self._owner = np.zeros(lane_loop.OWNER_SIZE, np.int64)
        self._owner[lane_loop.OWN_BELL] = self.bell
        self._owner_view = self._owner.data
        self._blocks = np.zeros((count, lane_loop.block_size(self.slots_each)), np.int64)
        self._blocks[:, lane_loop.BELL] = self._bells
        self._blocks[:, lane_loop.OWNER_BELL] = self.bell
        self._blocks[:, lane_loop.OWNER_CALLED] = address_of(self._owner)
        self._attention = np.zeros((count, 8), np.int64)
        self._table = np.array(
            [
                (address_of(self._blocks[i // self.slots_each]), self.slots_each,
                 address_of(self._attention[i // self.slots_each]), i, slots.addresses[i])
                for i in range(slots.count)
            ], np.int64
        )  # fmt: skip
        self._places = row_addresses(self._table)  # by slot
        self._ended_slots = np.empty(slots.count, np.int64)
        self._ended_view = self._ended_slots.data
        self._compile()
        self.collect_ended()
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _compile(self) -> None:
        """Compile all kernels that an event loop calls, so that the loop does not wait for it."""
        spare, attention = self._blocks[0].copy(), np.zeros(8, np.int64)
        row, query = np.zeros(fields.COUNT, np.int64), np.zeros((1, 1), np.float32)
        place = np.array(
            [address_of(spare), self.slots_each, address_of(attention), 0, address_of(row)]
        )
        lane_loop.start(address_of(place), address_of(row), query, 0, 0)
        self.tell(0, lane_loop.CLOSE)
        self._run(0)

    def start(self, slot: int, search: PreparedSearch) -> None:
        warm, count = search.warm_place
        lane_loop.start(self._places[slot], search.plan.row_address, search.query, warm, count)

    def run(self, slot: int, search: PreparedSearch) -> None:
        self.tell(slot, lane_loop.RUN)

    def tell(self, slot: int, kind: int) -> None:
        lane_loop.tell(self._places[slot], kind)

    def collect_ended(self) -> list[int]:
        count = lane_loop.collect(self._owner, self._blocks, self.slots_each, self._ended_slots)
        return self._ended_view[:count].tolist()

    def ms_per_extend(self) -> float | None:
        extends = self._owner_view[lane_loop.NEW_EXTENDS]
        return self._owner_view[lane_loop.NEW_BUSY_NS] / extends / 1e6 if extends else None

    def stats(self) -> LaneStats:
        extends, used, busy_ns = (
            self._blocks[:, lane_loop.EXTENDS : lane_loop.BUSY_NS + 1].sum(0).tolist()
        )
        return LaneStats(extends, used, busy_ns / 1e6)

    def close(self) -> None:
        for lane in range(self.count):
            self.tell(lane * self.slots_each, lane_loop.CLOSE)
        for thread in self._threads:
            thread.join()
        for counter in (*self._bells, self.bell):
            os.close(counter)

    def _serve(self, lane: int) -> None:
        run_as_batch_job()
        self._run(lane)

    def _run(self, lane: int) -> None:
        slots, slot_count = self._slots, self._slots.count
        places, extends_max = self._sizes
        try:
            lane_loop.serve(
                self._blocks[lane], self.slots_each, places, slots.fields, slots.top,
                slots.hit_keys, slots.visited, slots.tasks, np.empty(slot_count, np.int64),
                np.empty(slot_count, np.int64), np.zeros(slot_count, np.int64), extends_max,
                self._attention[lane],
            )  # fmt: skip
        except BaseException as error:
            self.failure = error
            os.eventfd_write(self.bell, 1)
            raise
