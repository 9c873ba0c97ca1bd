"""Links new documents and compacts deleted ones away, in the background and on one core.

The searches that linking needs go through the engine as its lowest class.
An index that is small enough to be scanned needs no edges. Few new rows wait until no more come:
to link some copies the graph.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from schemas.errors import QueueFull
from workers.search.index.index import Index
from workers.search.index.query import Effort
from workers.search.index.view import IndexView
from workers.search.kernels.arrays import Array
from workers.search.limits import SCANNED_ROWS_MAX
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings
from workers.search.words.shelf import Shelf
from workers.search.words.texts import passages_of

log = logging.getLogger("trivium.retrieval")
LOOSE_MIN = 256  # rows to link though more are coming
Neighbours = Callable[[IndexView, Array, Effort], Coroutine[Any, Any, Array]]  # an engine's


class Upkeep:
    """`finish` before the worker is ready, then `run` until cancelled."""

    def __init__(
        self, settings: RetrievalSettings, collections: Collections, neighbours: Neighbours
    ) -> None:
        self._settings = settings
        self._collections = collections
        self._neighbours = neighbours
        self._before: dict[str, int] = {}  # rows at the last look

    async def finish(self) -> None:
        """Link everything that there is, on all cores."""
        for index in list(self._collections.indexes.values()):
            while self._needs_links(index):
                await asyncio.to_thread(index.link)

    async def run(self) -> None:
        """Look now and then."""
        while True:
            await asyncio.sleep(self._settings.upkeep_interval_ms / 1000)
            for name, index in list(self._collections.indexes.items()):
                await self._look(name, index)

    async def _look(self, name: str, index: Index) -> None:
        index.threads = 1  # the others are for searches
        count = index.rows.count
        rests = self._before.get(name) == count
        self._before[name] = count
        if self._needs_links(index) and (rests or index.loose >= LOOSE_MIN):
            await self._link(name, index)
        if index.dead_share > self._settings.compact_share:
            await asyncio.to_thread(index.compact)
            log.info("%s: compacted from %d to %d rows", name, count, index.rows.count)
        shelf = self._collections.shelves.get(name)
        if shelf is not None and shelf.words.dead_share > self._settings.compact_share:
            async with self._collections.turn:
                await asyncio.to_thread(_compact_words, index, shelf)

    async def _link(self, name: str, index: Index) -> None:
        loop = asyncio.get_running_loop()

        def neighbours(view: IndexView, queries: Array, effort: Effort) -> Array:
            searching = self._neighbours(view, queries, effort)
            return asyncio.run_coroutine_threadsafe(searching, loop).result()

        try:
            await asyncio.to_thread(index.link, neighbours=neighbours)
        except QueueFull as error:
            log.warning("%s: new documents are linked later: %s", name, error.message)

    @staticmethod
    def _needs_links(index: Index) -> bool:
        return index.loose > 0 and index.rows.count > SCANNED_ROWS_MAX


def _compact_words(index: Index, shelf: Shelf) -> None:
    shelf.words.compact({each.row_id: each.text for each in passages_of(index)})
