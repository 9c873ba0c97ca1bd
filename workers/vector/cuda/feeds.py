"""Feeds on a device: arrays of queries that slots take one after the other, and their hits.

Slots write hits to pinned host memory. The queries, and the state of a feed that slots share, such
as its next query, are in device memory.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from workers.vector.cuda.batch import DeviceBatch
from workers.vector.cuda.device import Device, pinned_array, upload
from workers.vector.cuda.rings import DEPTH
from workers.vector.index import plans
from workers.vector.index.bulk import BulkHits, hits_of
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels.arrays import Array
from workers.vector.limits import SCANNED_ROWS_MAX
from workers.vector.traversal import fields

_CHUNK_QUERIES = 32_768  # most queries of a feed; the next feed is made while one runs
_CHUNK_HITS = 1 << 21  # most hits of a feed, in pinned memory
_NO_QUERY, _NOT_WARM = np.empty(0, np.float32), np.empty(0, np.int64)


class Feed:
    """Queries for any number of slots of one batch; `row`, with device addresses, is for each.

    `first` is the number of its first query among all queries of the caller.
    """

    def __init__(self, device: Device, queries: Array, k: int, row: Array, first: int = 0) -> None:
        self.first, self.is_empty = first, False
        self.slots: set[int] = set()  # slots that take queries
        self.counts = np.zeros(2, np.int64)  # extends and distances of all queries, at the end
        self.rows = pinned_array(device, (len(queries), k), np.int64)
        self.distances = pinned_array(device, (len(queries), k), np.float32)
        self._queries = upload(device, queries)
        columns = np.zeros(fields.FEED_COUNT, np.int64)
        columns[fields.FEED_LAST] = len(queries)
        columns[fields.FEED_QUERIES] = self._queries.address
        columns[fields.FEED_QUERY_BYTES] = queries.strides[0]
        columns[fields.FEED_ROWS] = self.rows.ctypes.data
        columns[fields.FEED_DISTANCES] = self.distances.ctypes.data
        self._columns = upload(device, columns)
        self._row = row.copy()
        self._row[fields.FEED], self._row[fields.FEED_PLACE] = self._columns.address, -1
        self._row[fields.STATUS] = fields.DONE  # so that a slot takes its first query

    def begin(self, batch: DeviceBatch, slots: Iterable[int]) -> None:
        """Let slots take queries of the feed."""
        for slot in slots:
            self.slots.add(slot)
            batch.assign(slot, self._row, _NO_QUERY, _NOT_WARM)

    def end(self, batch: DeviceBatch, slot: int) -> None:
        """Remove a slot that found no query left, and update the counts."""
        self.slots.remove(slot)
        self.is_empty = True
        self.counts = np.maximum(self.counts, batch.counts[slot])


def search_all(
    batch: DeviceBatch, effort: Effort, queries: Array, view: IndexView, *,
    scanned_rows_max: int = SCANNED_ROWS_MAX,
) -> BulkHits:  # fmt: skip
    """Search for the nearest rows of prepared queries, like `bulk.search_all`, on an idle batch."""

    def run(search: plans.PreparedSearch, rows: Array, distances: Array) -> Array:
        sums, row, k = np.zeros(2, np.int64), batch.copies.row(search.row, search), search.plan.k
        chunk = max(1, min(_CHUNK_QUERIES, _CHUNK_HITS // k))
        feeds = (
            Feed(batch.device, search.query[first : first + chunk], k, row, first)
            for first in range(0, len(rows), chunk)
        )
        for feed in _finished_feeds(batch, feeds):
            part = slice(feed.first, feed.first + len(feed.rows))
            rows[part], distances[part] = feed.rows, feed.distances
            sums += feed.counts
        return sums

    return hits_of(run, effort, queries, view, scanned_rows_max)


def _finished_feeds(batch: DeviceBatch, feeds: Iterator[Feed]) -> Iterator[Feed]:
    """Search for feeds, one after the other; yield each when all of its queries have hits.

    A slot that finds its feed empty takes queries of the next one, which was made meanwhile: no
    slot waits for the last query of another. The device works while the caller has a feed. Turns
    are the longest, because all slots wait for the last slot of a turn.
    """
    next_feeds, free = deque(islice(feeds, 1)), list(range(batch.places))
    by_slot: dict[int, Feed] = {}
    while next_feeds or by_slot:
        if next_feeds and free:
            feed_slots, free = free[: len(next_feeds[0].rows)], free[len(next_feeds[0].rows) :]
            next_feeds[0].begin(batch, feed_slots)
            by_slot |= dict.fromkeys(feed_slots, next_feeds[0])
        while batch.turns_in_flight < DEPTH:
            batch.launch(list(by_slot), batch.settings.steps[-1])
        next_feeds.extend(islice(feeds, 2 - len(next_feeds)))
        for slot in batch.collect():
            feed = by_slot.pop(slot)
            feed.end(batch, slot)
            free.append(slot)
            if not feed.slots:
                yield feed
        if next_feeds and next_feeds[0].is_empty:
            next_feeds.popleft()
    while batch.turns_in_flight:
        batch.collect()
