"""The lane of a CUDA device: the counterpart of `core_lanes.py`, with all slots in one batch.

Its thread executes commands, launches the next turn while one runs, and reports ended slots. A slot
that is given up ends when no turn in flight may step it any more; then its memory may be freed.
"""

import ctypes
import os
import threading
from collections import deque
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

import numpy as np

from workers.vector.cuda.batch import BatchSettings, DeviceBatch
from workers.vector.cuda.device import Device
from workers.vector.cuda.feeds import Feed
from workers.vector.cuda.rings import DEPTH
from workers.vector.engine.lane_loop import CLOSE, END, PARK, RESUME, RUN
from workers.vector.engine.lanes import LaneStats, run_as_batch_job
from workers.vector.index.plans import PreparedSearch
from workers.vector.kernels.arrays import Array
from workers.vector.kernels.jit import kernel
from workers.vector.traversal import fields
from workers.vector.traversal.slots import SlotRows

_FEEDS, _FEED_QUERIES = 32, 64
_NO_WARM = np.empty(0, np.int64)


class CudaLanes:
    """`Lanes` of one device; a single lane has all slots."""

    backend, count = "cuda", 1
    feeds, feed_queries = _FEEDS, _FEED_QUERIES

    def __init__(self, device: Device, sizes: BatchSettings, *, name: str) -> None:
        self.batch = DeviceBatch(device, sizes)
        self.slots, self.slots_each = SlotRows(self.batch.top, self.batch.hit_keys), sizes.slots
        self.dim_max, self.tasks_max = sizes.dim_max, sizes.tasks_max
        self.top_m_max = sizes.top_m_max
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.failure: BaseException | None = None
        self._commands: SimpleQueue[tuple[int, int, Any]] = SimpleQueue()
        self._ended_slots: deque[int] = deque()
        self._active: dict[int, bool] = {}  # running slots, and whether they have a feed
        self._parked: dict[int, bool] = {}
        self._feeds: dict[int, tuple[Feed, int]] = {}  # by slot, with the host feed's address
        self._leaving: deque[tuple[int, int]] = deque()  # turns that must be over, slot given up
        self._places_used = self._busy_ns = self._since_ns = 0
        self._last = (0, 0)
        # a single query waits for a turn, so turns longer than the second are for bulk searches
        self._steps = sizes.steps[0], sizes.steps[:2][-1]
        _fill_counts(self.slots.fields, self.batch.counts, np.zeros(1, np.int64))  # compile it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, slot: int, search: PreparedSearch) -> None:
        search.enter(self.slots, slot)
        self._commands.put((RUN, slot, (None, search)))

    def run(self, slot: int, search: PreparedSearch) -> None:
        self._commands.put((RUN, slot, (self.slots.fields[slot].copy(), search)))

    def tell(self, slot: int, kind: int) -> None:
        self._commands.put((kind, slot, None))

    def collect_ended(self) -> list[int]:
        try:  # `suppress` takes longer than the call
            os.eventfd_read(self.bell)
        except BlockingIOError:
            pass
        ended_slots = [self._ended_slots.popleft() for _ in range(len(self._ended_slots))]
        if ended_slots:
            _fill_counts(self.slots.fields, self.batch.counts, np.array(ended_slots, np.int64))
        return ended_slots

    def ms_per_extend(self) -> float | None:
        extends, busy_ns = self.batch.extends, self._busy_ns
        (extends_before, before_ns), self._last = self._last, (extends, busy_ns)
        if extends == extends_before:
            return None
        return (busy_ns - before_ns) / (extends - extends_before) / 1e6

    def stats(self) -> LaneStats:
        return LaneStats(self.batch.extends, self._places_used, self._busy_ns / 1e6)

    def close(self) -> None:
        self.tell(0, CLOSE)
        self._thread.join()
        os.close(self.bell)

    def _run(self) -> None:
        run_as_batch_job()
        try:
            while self._run_commands():
                self._turn()
        except BaseException as error:
            self.failure = error
            os.eventfd_write(self.bell, 1)
            raise

    def _run_commands(self) -> bool:
        """Execute commands, and wait for one if the device is idle; return False after CLOSE."""
        idle = not self._active and not self.batch.turns_in_flight
        while idle or not self._commands.empty():
            kind, slot, what = self._commands.get()
            idle = False
            if kind == CLOSE:
                while self.batch.turns_in_flight:
                    self.batch.collect()
                return False
            if kind == RUN:
                self._assign(slot, *what)
            elif kind == PARK and slot in self._active:
                self._parked[slot] = self._active.pop(slot)
            elif kind == RESUME and slot in self._parked:
                self._active[slot] = self._parked.pop(slot)
            elif kind == END and (slot in self._active or slot in self._parked):
                self._active.pop(slot, None)
                self._parked.pop(slot, None)
                self.batch.give_up(slot)
                self._leaving.append((self.batch.turns, slot))
                self._end_given_up()
        return True

    def _turn(self) -> None:
        """Launch a turn if there is room, and collect the slots that ended."""
        batch = self.batch
        if self._active and batch.turns_in_flight < DEPTH:
            if not batch.turns_in_flight:
                self._since_ns = perf_counter_ns()
            active = list(self._active)[: batch.places]
            # slots with feeds refill themselves, and few slots seldom end, so the host can wait
            is_long = len(active) <= batch.settings.sizes[0] or all(self._active.values())
            before = batch.extends
            batch.launch(active, self._steps[is_long])
            self._places_used += (batch.extends - before) * len(active)
        if batch.turns_in_flight == DEPTH or (batch.turns_in_flight and not self._active):
            ended_slots = batch.collect()
            now_ns = perf_counter_ns()
            self._busy_ns += now_ns - self._since_ns
            self._since_ns = now_ns
            self._report_ended(ended_slots)
            self._end_given_up()

    def _assign(self, slot: int, row: Array | None, search: PreparedSearch) -> None:
        """Give a slot its search; `row` is the slot's, None if it is the plan's shared row."""
        batch, warm = self.batch, _NO_WARM if search.warm is None else search.warm
        self._active[slot] = False
        if row is None:
            batch.assign(slot, batch.copies.shared_row(search), search.query[0], warm)
            return
        on_device, source = batch.copies.row(row, search), int(row[fields.FEED])
        if source:
            feed = self._feed(row, search, source, on_device)
            self._feeds[slot] = (feed, source)
            feed.begin(batch, [slot])
            self._active[slot] = True
        else:
            batch.assign(slot, on_device, search.query[0], warm[: row[fields.WARM_COUNT]])

    def _feed(self, row: Array, search: PreparedSearch, source: int, on_device: Array) -> Feed:
        """Make a device feed of the rest of a host's feed, from the query that the slot took."""
        first, last = int(row[fields.FEED_PLACE]), _feed_columns(source)[fields.FEED_LAST]
        queries, k = search.query[first:last], search.plan.k
        return Feed(self.batch.device, queries, k, on_device)

    def _report_ended(self, slots: list[int]) -> None:
        """Report ended slots to the owner; hits of feeds are copied to the host's arrays."""
        for slot in slots:
            self._active.pop(slot, None)
            self._parked.pop(slot, None)
            if slot in self._feeds:
                feed, source = self._feeds.pop(slot)
                _copy_hits(feed, _feed_columns(source), self.batch.counts[slot])
            self._ended_slots.append(slot)
        if slots:
            os.eventfd_write(self.bell, 1)

    def _end_given_up(self) -> None:
        """End the slots that were given up and that no turn in flight may step."""
        over = self.batch.turns - self.batch.turns_in_flight
        slots = []
        while self._leaving and self._leaving[0][0] <= over:
            slots.append(self._leaving.popleft()[1])
            self._feeds.pop(slots[-1], None)
        self._report_ended(slots)


@kernel
def _fill_counts(rows: Array, counts: Array, slots: Array) -> None:
    """Copy counts to slots' rows: int64 (all slots, 2), extends and distances."""
    for slot in slots:
        rows[slot, fields.EXTENDS], rows[slot, fields.DISTANCES] = counts[slot, 0], counts[slot, 1]


def _feed_columns(address: int) -> Array:
    """Return the columns of the host's feed at an address, without a copy."""
    columns: Any = (ctypes.c_int64 * fields.FEED_COUNT).from_address(address)
    row: Array = np.frombuffer(columns, np.int64)
    return row


def _copy_hits(feed: Feed, source: Array, sums: Array) -> None:
    """Copy a feed's hits to the end of the host feed's arrays, and add its counts."""
    first = int(source[fields.FEED_LAST]) - len(feed.rows)
    for column, hits in ((fields.FEED_ROWS, feed.rows), (fields.FEED_DISTANCES, feed.distances)):
        target = int(source[column]) + first * hits.strides[0]
        ctypes.memmove(target, hits.ctypes.data, hits.nbytes)
    source[fields.FEED_EXTENDS] += sums[0]
    source[fields.FEED_COMPUTED] += sums[1]
    source[fields.FEED_NEXT] = source[fields.FEED_LAST]
