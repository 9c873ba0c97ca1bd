"""Makes documents of the files that callers put into vector stores, and takes away what is deleted.

One gateway does it for all: the first of those that live. What is wanted and what has come of it
stand on the log, documents have ids that follow from their file, and the same text embeds nothing
again. So another gateway goes on where one has died, and what was done twice is the same as once.
`tending.py` does the rest.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from schemas.codec import Codec
from schemas.errors import OverloadError, TriviumError
from schemas.fleet import FleetView
from schemas.log.clock import wall_ms
from schemas.log.endings import ended
from schemas.log.ingester import Ingester
from schemas.log.patience import TROUBLE, over_every_trouble
from schemas.records import Document, StoreFileResult, VectorStore
from schemas.settings import LogSettings
from streams.gateway.indexing.documents import declaration, document_id, documents_of
from streams.gateway.indexing.reading import Unusable, texts_of
from streams.gateway.indexing.tending import Tending
from streams.gateway.log.objects import ObjectLog
from streams.gateway.objects.table import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    PRESENT,
    Entry,
    key_of,
)
from streams.parsing.parsed import INVALID

logger = logging.getLogger(__name__)
FILES_AT_ONCE = 8
BUG = "an error of the gateway; its log has the details"
PACE_S = 1.0  # between looks, where nothing is new
Place = tuple[str, str, str]  # tenant, store and file
Job = tuple[int, bool, "asyncio.Task[None]"]  # for which revision, and whether it is to be there


class Indexer:
    """`run` until cancelled."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        objects: ObjectLog,
        view: Callable[[], FleetView],
        *,
        is_first: Callable[[], bool],
        parse_ms: int,
    ) -> None:
        self._log, self._codec = log, codec
        self._objects, self._view = objects, view
        self._is_first, self._parse_ms = is_first, parse_ms
        self._tending = Tending(log, objects)
        self._declared: set[str] = set()  # stores, by this process
        self._put = asyncio.Event()

    async def run(self) -> None:
        """Over every trouble of the log."""
        troubles = (*TROUBLE, TriviumError)
        await over_every_trouble(self._follow_news, "vector stores", logger, troubles=troubles)

    async def _follow_news(self) -> None:
        while True:
            await self._news()
            if self._is_first():
                await self._tending.tend()
                await self._index_all()

    async def _news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PACE_S), self._objects.news:
                await self._objects.news.wait()

    async def _index_all(self) -> None:
        """As long as there is something to do."""
        if not any(self._objects.table.undone()):
            return
        ingester = Ingester(self._log, self._codec, self._view)
        await ingester.start()
        following = asyncio.create_task(self._follow(ingester))
        jobs: dict[Place, Job] = {}
        try:
            while self._is_first():
                await self._tending.tend()
                await self._begin_and_end(ingester, jobs)
                if not jobs:
                    return
                news = asyncio.create_task(self._news())
                tasks = [task for *_, task in jobs.values()]
                await asyncio.wait([news, following, *tasks], return_when="FIRST_COMPLETED")
                await ended(news)
                if following.done():
                    following.result()
        finally:
            try:
                await ended(following, *(task for *_, task in jobs.values()))
            finally:
                await ingester.stop()

    async def _begin_and_end(self, ingester: Ingester, jobs: dict[Place, Job]) -> None:
        """Reap what has ended, end what is not wanted any more, begin what is."""
        undone = self._undone()
        for place, (*wish, task) in list(jobs.items()):
            now = undone.get(place)
            if not task.done() and (now is None or wish != [*_wish(*now)]):
                await ended(task)
            if task.done():
                del jobs[place]
                if not task.cancelled():
                    task.result()
        undone = self._undone()
        indexing = sum(is_present for _, is_present, _ in jobs.values())
        for place, (store, entry) in undone.items():
            revision, is_present = _wish(store, entry)
            if place in jobs or (is_present and indexing >= FILES_AT_ONCE):
                continue
            if is_present:
                assert store is not None
                indexing += 1
                job = self._index(ingester, store, entry)
            else:
                job = self._remove(ingester, store, entry)
            jobs[place] = revision, is_present, asyncio.create_task(job)

    def _undone(self) -> dict[Place, tuple[VectorStore | None, Entry]]:
        return {
            (entry.wanted.tenant, entry.wanted.store_id, entry.wanted.file_id): (store, entry)
            for store, entry in self._objects.table.undone()
        }

    async def _follow(self, ingester: Ingester) -> None:
        while True:
            await self._put.wait()
            self._put.clear()
            await ingester.follow(lambda fates: None)

    # One file

    async def _index(self, ingester: Ingester, store: VectorStore, entry: Entry) -> None:
        wanted = entry.wanted
        result = StoreFileResult(
            store_id=wanted.store_id,
            file_id=wanted.file_id,
            tenant=wanted.tenant,
            revision=wanted.revision,
            status=IN_PROGRESS,
            documents=entry.result.documents if entry.result is not None else 0,
            at_ms=wall_ms(),
        )
        try:
            result, documents = await self._documents(store, entry, result)
            wrong = await self._written(ingester, documents)
        except Unusable as error:
            result = replace(result, status=FAILED, error_code=error.code, error=str(error))
        except (*TROUBLE, OverloadError):
            raise  # it is tried again
        except Exception:
            logger.exception("%s in %s: a bug", wanted.file_id, wanted.store_id)
            result = replace(result, status=FAILED, error_code="server_error", error=BUG)
        else:
            status = FAILED if wrong else COMPLETED
            code = INVALID if wrong else ""
            result = replace(result, status=status, error_code=code, error=wrong[:1_000])
        await self._objects.put(replace(result, at_ms=wall_ms()))

    async def _documents(
        self, store: VectorStore, entry: Entry, result: StoreFileResult
    ) -> tuple[StoreFileResult, list[Document]]:
        """All of a file's; the log knows how many before the first is there. Raises Unusable."""
        wanted = entry.wanted
        if store.store_id not in self._declared:
            await self._tending.declare(store.store_id, declaration(store, wall_ms()))
            self._declared.add(store.store_id)
        file = self._objects.table.file(wanted.tenant, wanted.file_id)
        if file is None:
            raise Unusable(INVALID, "the file was deleted")
        texts = await texts_of(file, self._objects.read_parts(file), self._parse_ms)
        documents = documents_of(file, wanted, texts, wall_ms())
        usage = sum(len(document.text.encode()) for document in documents)
        count = max(len(documents), result.documents)
        result = replace(result, documents=count, usage_bytes=usage, at_ms=wall_ms())
        await self._objects.put(result)
        return result, documents

    async def _written(self, ingester: Ingester, documents: list[Document]) -> str:
        """When they are found; what the first refused one was refused with."""
        loop = asyncio.get_running_loop()
        fates: list[asyncio.Future[str]] = [loop.create_future() for _ in documents]
        for document, fate in zip(documents, fates, strict=True):
            await ingester.put(document, _setter(fate))
        self._put.set()
        return next((reason for reason in await asyncio.gather(*fates) if reason), "")

    async def _remove(self, ingester: Ingester, store: VectorStore | None, entry: Entry) -> None:
        """Its documents, and then what is known of it."""
        wanted, result = entry.wanted, entry.result
        for number in range(result.documents if result is not None else 0):
            await ingester.drop(wanted.store_id, document_id(wanted.file_id, number))
        await ingester.flush()
        if store is not None and wanted.wanted == CANCELLED:
            assert result is not None, "else nothing was to be done"
            result = replace(result, documents=0, usage_bytes=0, at_ms=wall_ms())
            await self._objects.put(result)
            return
        keys = [key_of(each) for each in (result, wanted) if each is not None]
        await self._objects.drop(*keys)


def _wish(store: VectorStore | None, entry: Entry) -> tuple[int, bool]:
    """Of which revision, and whether the file is to be there."""
    return entry.wanted.revision, store is not None and entry.wanted.wanted == PRESENT


def _setter(fate: "asyncio.Future[str]") -> Callable[[str], None]:
    def done(reason: str) -> None:
        if not fate.done():
            fate.set_result(reason)

    return done
