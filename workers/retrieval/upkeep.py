"""Links new rows and compacts deleted ones, in the background and on one core.

Linking needs searches. They run in the engine as its lowest class, in the time that other searches
leave. If rows wait because that is too slow, a thread here makes the searches: then the operating
system shares the cores fairly. If even that is too slow, the feeds wait
(`Collections.wait_for_room`). An index that is small enough to be scanned needs no edges. A few new
rows wait until no more arrive. After an audit that missed many rows, each round searches for a
batch of all rows, and adds edges to those that searches lose (`Index.relink_lost`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from schemas.errors import QueueFull
from workers.retrieval.collections import Collections
from workers.retrieval.passages.passage_store import PassageStore
from workers.retrieval.passages.texts import passages_of
from workers.retrieval.settings import LOOSE_MIN, RetrievalSettings
from workers.vector.index.audit import Neighbours
from workers.vector.index.index import Index
from workers.vector.index.query import Effort
from workers.vector.index.view import IndexView
from workers.vector.kernels.arrays import Array
from workers.vector.limits import SCANNED_ROWS_MAX

log = logging.getLogger("trivium.retrieval")
_STARVED_S = 0.1  # between checks whether the engine's lowest class is fast enough
AsyncNeighbours = Callable[[IndexView, Array, Effort], Coroutine[Any, Any, Array]]  # of an engine


class Upkeep:
    """The upkeep of all indexes: `finish` before the worker is ready, then `run`."""

    def __init__(
        self, settings: RetrievalSettings, collections: Collections, neighbours: AsyncNeighbours
    ) -> None:
        self._settings = settings
        self._collections = collections
        self._neighbours = neighbours
        self._last_counts: dict[str, int] = {}  # rows at the last check, by collection

    async def finish(self) -> None:
        """Link all rows that lack edges, on all cores."""
        for index in list(self._collections.indexes.values()):
            while self._needs_links(index):
                await asyncio.to_thread(index.link)

    async def run(self) -> None:
        """Maintain the indexes every `upkeep_interval_ms`, without a pause while rows wait."""
        linked = self._collections.linked = self._collections.linked or asyncio.Event()
        while True:
            pending = [
                await self._maintain(name, index)
                for name, index in list(self._collections.indexes.items())
            ]
            linked.set()
            if not any(pending):
                await asyncio.sleep(self._settings.upkeep_interval_ms / 1000)

    async def _maintain(self, name: str, index: Index) -> bool:
        """Link, relink or compact one index; return whether rows were linked and more wait."""
        index.threads = 1  # the other cores are for searches
        count = index.rows.count
        is_stable = self._last_counts.get(name) == count
        self._last_counts[name] = count
        has_more = False
        if self._needs_links(index) and (is_stable or index.loose >= LOOSE_MIN):
            has_more = await self._with_engine(name, index, index.link) and index.loose >= LOOSE_MIN
        if not has_more:
            await self._with_engine(name, index, index.relink_lost)
        if index.dead_share > self._settings.compact_share:
            await asyncio.to_thread(index.compact)
            log.info("%s: compacted from %d to %d rows", name, count, index.rows.count)
        store = self._collections.stores.get(name)
        if store is not None and store.words.dead_share > self._settings.compact_share:
            async with self._collections.change_lock:
                await asyncio.to_thread(_compact_words, index, store)
        return has_more

    async def _with_engine(
        self, name: str, index: Index, change: Callable[[int, Neighbours], Any]
    ) -> bool:
        """Call `change` with searches of the engine; return False if its queue was full."""
        loop = asyncio.get_running_loop()

        def rows_wait() -> bool:
            return index.loose > self._settings.loose_max // 2

        def neighbours(view: IndexView, queries: Array, effort: Effort) -> Array:
            if not rows_wait():
                searching = self._neighbours(view, queries, effort)
                future = asyncio.run_coroutine_threadsafe(searching, loop)
                while not rows_wait():
                    with suppress(TimeoutError):
                        return future.result(_STARVED_S)
                future.cancel()
            return index.neighbours(view, queries, effort)

        try:
            await asyncio.to_thread(change, LOOSE_MIN, neighbours)
        except QueueFull as error:
            log.warning("%s: rows are linked later: %s", name, error.message)
            return False
        return True

    @staticmethod
    def _needs_links(index: Index) -> bool:
        return index.loose > 0 and index.rows.count > SCANNED_ROWS_MAX


def _compact_words(index: Index, store: PassageStore) -> None:
    store.words.compact({passage.row_id: passage.text for passage in passages_of(index)})
