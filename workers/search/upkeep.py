"""Links new documents and compacts deleted ones away, in the background and on one core.

An index that is small enough to be scanned needs no edges. Few new rows wait until no more come:
to link some copies the graph.
"""

import asyncio
import logging

from workers.search.admission import SCANNED_ROWS_MAX
from workers.search.collections import Collections
from workers.search.index import Index
from workers.search.settings import RetrievalSettings

log = logging.getLogger("trivium.retrieval")
LOOSE_MIN = 256  # rows to link though more are coming


class Upkeep:
    """`finish` before the worker is ready, then `run` until cancelled."""

    def __init__(self, settings: RetrievalSettings, collections: Collections) -> None:
        self._settings = settings
        self._collections = collections
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
            await asyncio.to_thread(index.link)
        if index.dead_share > self._settings.compact_share:
            await asyncio.to_thread(index.compact)
            log.info("%s: compacted from %d to %d rows", name, count, index.rows.count)

    @staticmethod
    def _needs_links(index: Index) -> bool:
        return index.loose > 0 and index.rows.count > SCANNED_ROWS_MAX
