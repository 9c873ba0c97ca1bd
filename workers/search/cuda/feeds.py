"""Arrays of queries that slots on a device take one after the other, and where their hits go.

Queries and hits lie in pinned host memory, so that each crosses the bus once and nothing is waited
for; what slots share of a feed, its next query above all, lies on the device.
"""

import numpy as np

from workers.search.cuda.batch import Batch
from workers.search.cuda.device import Device, pinned, uploaded
from workers.search.cuda.rings import DEPTH
from workers.search.index import ways
from workers.search.index.bulk import BulkHits, hits_of
from workers.search.index.query import Effort
from workers.search.index.view import IndexView
from workers.search.kernels.arrays import Array
from workers.search.limits import SCANNED_ROWS_MAX
from workers.search.walk import fields

_CHUNK_QUERIES = 16_384  # of a bulk search, in pinned memory; the next ones are copied meanwhile
_NO_QUERY, _NOT_WARM = np.empty(0, np.float32), np.empty(0, np.int64)


class Feed:
    """Queries for any number of slots of one batch."""

    def __init__(self, device: Device, queries: Array, k: int) -> None:
        self.queries = pinned(device, queries.shape, np.float32)
        self.queries[:] = queries
        self.rows = pinned(device, (len(queries), k), np.int64)
        self.distances = pinned(device, (len(queries), k), np.float32)
        row = np.zeros(fields.FEED_COUNT, np.int64)
        row[fields.FEED_LAST] = len(queries)
        row[fields.FEED_QUERIES] = self.queries.ctypes.data
        row[fields.FEED_QUERY_BYTES] = self.queries.strides[0]
        row[fields.FEED_ROWS] = self.rows.ctypes.data
        row[fields.FEED_DISTANCES] = self.distances.ctypes.data
        self._shared = uploaded(device, row)

    def assign(self, batch: Batch, slot: int, row: Array) -> None:
        """Let a slot take from it; `row` has device addresses."""
        row = row.copy()
        row[fields.FEED], row[fields.FEED_PLACE] = self._shared.address, -1
        row[fields.STATUS] = fields.DONE  # with the query before the first
        batch.assign(slot, row, _NO_QUERY, _NOT_WARM)


def search_all(
    batch: Batch, effort: Effort, queries: Array, view: IndexView, *,
    scanned_rows_max: int = SCANNED_ROWS_MAX,
) -> BulkHits:  # fmt: skip
    """The nearest rows of prepared queries, as `bulk.search_all`; the batch must be idle."""

    def run(search: ways.Search, rows: Array, distances: Array) -> Array:
        sums, row, done = np.zeros(2, np.int64), batch.copies.row(search.row, search), 0
        feeds = (
            Feed(batch.device, search.query[first : first + _CHUNK_QUERIES], search.way.k)
            for first in range(0, len(rows), _CHUNK_QUERIES)
        )
        feed = next(feeds, None)
        while feed is not None:
            active = _begun(batch, feed, row)
            following = next(feeds, None)  # made while the device searches
            sums += _ended(batch, active)
            part = slice(done, done + len(feed.rows))
            rows[part], distances[part] = feed.rows, feed.distances
            feed, done = following, part.stop
        return sums

    return hits_of(run, effort, queries, view, scanned_rows_max)


def _begun(batch: Batch, feed: Feed, row: Array) -> list[int]:
    """Let slots search for a feed, with all turns under way that there may be; which slots."""
    active = list(range(min(batch.places, len(feed.rows))))
    for slot in active:
        feed.assign(batch, slot, row)
    _launch(batch, active)
    return active


def _ended(batch: Batch, active: list[int]) -> Array:
    """Wait until the slots have ended; extends and distances that their feed took."""
    sums = np.zeros(2, np.int64)
    while active:
        _launch(batch, active)
        for slot in batch.collect():
            active.remove(slot)
            sums = np.maximum(sums, batch.counts[slot])
    while batch.under_way:
        batch.collect()
    return sums


def _launch(batch: Batch, active: list[int]) -> None:
    while batch.under_way < DEPTH:
        batch.launch(active, batch.settings.steps[-1])
