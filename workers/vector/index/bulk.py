"""Searches an array of queries on all cores, without a return to the interpreter in between.

Each thread has some slots, and feeds with its share of the queries. The results equal those of
single searches, for any number of slots and threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workers.vector.index import plans
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels.arrays import Array, address_of
from workers.vector.kernels.parallel import over_rows
from workers.vector.limits import SCANNED_ROWS_MAX
from workers.vector.traversal import fields, steps
from workers.vector.traversal.slots import CpuSlots, SlotRows

SLOTS_PER_THREAD = 2  # more would evict each other from the L1 cache
_FEEDS_PER_THREAD = 2  # few, because slots are idle at the start and the end of a feed
_WHOLE = 1 << 60

# Runs a search of several queries and fills in its rows and distances, both of shape (queries, k);
# returns the extends made and distances computed, int64 (2,).
Run = Callable[[plans.PreparedSearch, Array, Array], Array]


@dataclass(frozen=True, slots=True, eq=False)
class BulkHits:
    """Results of many queries; places beyond the last hit have row -1 at infinity."""

    rows: Array  # (queries, k), int64
    distances: Array  # (queries, k), float32, as kernels compute them
    extends: int
    computed: int


def feed(queries: Array, rows: Array, distances: Array, first: int, last: int) -> Array:
    """Make a feed of queries `first` to `last`; all three arrays must outlive it."""
    row = np.zeros(fields.FEED_COUNT, np.int64)
    row[fields.FEED_NEXT], row[fields.FEED_LAST] = first, last
    row[fields.FEED_QUERIES], row[fields.FEED_QUERY_BYTES] = address_of(queries), queries.strides[0]
    row[fields.FEED_ROWS], row[fields.FEED_DISTANCES] = address_of(rows), address_of(distances)
    return row


def take(slots: SlotRows, slot: int, search: plans.PreparedSearch, source: Array) -> bool:
    """Put a search of a feed's next query into a slot; return False if the feed is empty."""
    place = int(source[fields.FEED_NEXT])
    if place >= source[fields.FEED_LAST]:
        return False
    source[fields.FEED_NEXT] += 1
    row = slots.fields[slot]
    row[:] = search.row
    row[fields.FEED], row[fields.FEED_PLACE] = address_of(source), place
    row[fields.QUERY] = source[fields.FEED_QUERIES] + place * source[fields.FEED_QUERY_BYTES]
    return True


def search_all(
    effort: Effort, queries: Array, view: IndexView, *, threads: int = 0,
    slots_per_thread: int = SLOTS_PER_THREAD, scanned_rows_max: int = SCANNED_ROWS_MAX,
) -> BulkHits:  # fmt: skip
    """Search for the nearest rows of prepared queries; raises what `plans.plan_search` raises."""

    def run(search: plans.PreparedSearch, rows: Array, distances: Array) -> Array:
        def part(first: int, last: int) -> Array:
            source = feed(search.query, rows, distances, first, last)
            run_feed(search, source, slots_per_thread)
            return source[[fields.FEED_EXTENDS, fields.FEED_COMPUTED]]

        sums: Array = np.sum(
            over_rows(part, len(rows), threads=threads, chunks_per_thread=_FEEDS_PER_THREAD), 0
        )
        return sums

    return hits_of(run, effort, queries, view, scanned_rows_max)


def hits_of(
    run: Run, effort: Effort, queries: Array, view: IndexView, scanned_rows_max: int
) -> BulkHits:
    """Search with `run`, and scan all rows for the queries that it found too few hits for."""
    search = plans.search_of(effort, queries, view, scanned_rows_max=scanned_rows_max)
    rows = np.empty((len(queries), effort.k), np.int64)
    distances = np.empty((len(queries), effort.k), np.float32)
    extends, computed = run(search, rows, distances).tolist()
    if len(short := search.plan.too_short(rows)):
        rescan = hits_of(run, effort, np.ascontiguousarray(queries[short]), view, view.count)
        rows[short], distances[short] = rescan.rows, rescan.distances
        extends, computed = extends + rescan.extends, computed + rescan.computed
    return BulkHits(rows, distances, extends, computed)


def run_feed(search: plans.PreparedSearch, source: Array, slot_count: int) -> None:
    """Search for all queries of a feed, on `slot_count` slots in this thread."""
    top_m = int(search.row[fields.TOP_M])
    slots = CpuSlots(slot_count, top_m_max=top_m, k_max=search.plan.k)
    active = np.array([i for i in range(slot_count) if take(slots, i, search, source)], np.int64)
    finished = np.empty(slot_count, np.int64)
    while len(active):
        ended_count, _ = steps.advance(
            slots.fields, slots.top, slots.hit_keys, slots.visited, active, len(active),
            slots.tasks, finished, _WHOLE, slots.attention,
        )  # fmt: skip
        active = np.setdiff1d(active, finished[:ended_count])
