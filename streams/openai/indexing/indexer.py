"""Indexes the files that callers add to vector stores, and removes those that are deleted.

One gateway does it for all: the first of those that are alive. Desired states and results are on
the log, ids of documents follow from their file, and an unchanged text is not embedded again. So
another gateway continues after a failure, and work done twice has the same result as once. Tenants
take turns: the tenant with the fewest files in progress is next, and the number of a file's
documents on the log that are not embedded or not indexed yet is bounded. `expiry.py` does the rest.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from schemas.codec import Codec
from schemas.errors import OverloadError, TriviumError
from schemas.fleet import FleetView
from schemas.records import Document, StoreFileResult, VectorStore
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms
from streams.log.documents import Ingester
from streams.log.retry import TRANSIENT_ERRORS, retry_forever
from streams.log.slices import in_slices
from streams.openai.indexing.documents import declaration, document_id, documents_of
from streams.openai.indexing.expiry import ExpirySweeper
from streams.openai.indexing.reading import INDEX_PROCESS, Unusable, texts_of
from streams.openai.objects.log import ObjectLog
from streams.openai.objects.stores import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    PRESENT,
    StoreEntry,
)
from streams.openai.objects.table import FileKey, key_of
from streams.parsing.document import INVALID

logger = logging.getLogger(__name__)
FILES_AT_ONCE, FILES_OF_TENANT = 32, 8  # to add to stores; as many to remove
FOR_NEWCOMERS = FILES_AT_ONCE // 4  # of these, for tenants without files in progress
# Documents of a file that are written and not embedded, or not indexed yet: other files' documents
# wait behind them. Index workers report their progress in heartbeats.
EMBEDDED_NEXT, INDEXED_NEXT = 64, 1_024
BUG = "an error of the gateway; its log has the details"
PACE_S = 1.0  # between checks without news
Job = tuple[int, bool, "asyncio.Task[None]"]  # revision, whether to add the file, task


class Indexer:
    """Indexes the files of vector stores; `run` ends when it is cancelled."""

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
        self._sweeper = ExpirySweeper(log, objects)
        self._declared: set[str] = set()  # ids of stores that this process has declared
        self._put = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled; retry after every failure of the log."""
        troubles = (*TRANSIENT_ERRORS, TriviumError)
        await retry_forever(self._follow_news, "vector stores", logger, errors=troubles)

    async def _follow_news(self) -> None:
        while True:
            await self._news()
            if self._is_first():
                await self._sweeper.sweep()
                await self._index_all()

    async def _news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PACE_S), self._objects.news:
                await self._objects.news.wait()

    async def _index_all(self) -> None:
        """Run jobs as long as any file is pending."""
        if not self._objects.table.has_pending():
            return
        ingester = Ingester(self._log, self._codec, self._view)
        await ingester.start()
        following = asyncio.create_task(self._follow(ingester))
        jobs: dict[FileKey, Job] = {}
        try:
            while self._is_first():
                await self._sweeper.sweep()
                await self._begin_and_end(ingester, jobs)
                if not jobs:
                    return
                news = asyncio.create_task(self._news())
                tasks = [task for *_, task in jobs.values()]
                await asyncio.wait([news, following, *tasks], return_when="FIRST_COMPLETED")
                await cancel_and_wait(news)
                if following.done():
                    following.result()
        finally:
            try:
                await cancel_and_wait(following, *(task for *_, task in jobs.values()))
            finally:
                await ingester.stop()

    async def _begin_and_end(self, ingester: Ingester, jobs: dict[FileKey, Job]) -> None:
        """Collect finished jobs, cancel those that are no longer wanted, and start new ones."""
        table = self._objects.table
        for place, (*target, task) in list(jobs.items()):
            now = table.pending_entry(place)
            if not task.done() and (now is None or target != [*_target(*now)]):
                await cancel_and_wait(task)
            if task.done():
                del jobs[place]
                if not task.cancelled():
                    task.result()
        for is_present in (True, False):
            while (chosen := self._next(jobs, is_present)) is not None:
                pending_entry = table.pending_entry(chosen)
                assert pending_entry is not None, "it is among those"
                store, entry = pending_entry
                if is_present:
                    assert store is not None
                    job = self._index(ingester, store, entry)
                else:
                    job = self._remove(ingester, store, entry)
                jobs[chosen] = entry.spec.revision, is_present, asyncio.create_task(job)

    def _next(self, jobs: dict[FileKey, Job], is_present: bool) -> FileKey | None:
        """Return the next file to add or to remove, of the tenant with the fewest jobs, or None."""
        table = self._objects.table
        running = Counter(place[0] for place, (_, kind, _) in jobs.items() if kind is is_present)
        if running.total() >= FILES_AT_ONCE:
            return None
        for tenant in sorted(table.pending_tenants(is_present=is_present), key=running.__getitem__):
            has_many = running[tenant] >= FILES_OF_TENANT
            is_full = running.total() >= FILES_AT_ONCE - FOR_NEWCOMERS
            if not has_many and not (is_full and running[tenant]):
                place = table.next_pending(tenant, jobs, is_present=is_present)
                if place is not None:
                    return place
        return None

    async def _follow(self, ingester: Ingester) -> None:
        while True:
            await self._put.wait()
            self._put.clear()
            await ingester.follow(lambda fates: None)

    # One file

    async def _index(self, ingester: Ingester, store: VectorStore, entry: StoreEntry) -> None:
        spec = entry.spec
        result = StoreFileResult(
            store_id=spec.store_id,
            file_id=spec.file_id,
            tenant=spec.tenant,
            revision=spec.revision,
            status=IN_PROGRESS,
            documents=entry.result.documents if entry.result is not None else 0,
            at_ms=wall_ms(),
        )
        try:
            result, documents = await self._documents(store, entry, result)
            wrong = await self._write_and_wait(ingester, documents)
        except Unusable as error:
            result = replace(result, status=FAILED, error_code=error.code, error=str(error))
        except TRANSIENT_ERRORS:
            raise  # it is retried
        except OverloadError:  # only for now; other jobs continue
            await asyncio.sleep(PACE_S)
            return
        except Exception:
            logger.exception("%s in %s: a bug", spec.file_id, spec.store_id)
            result = replace(result, status=FAILED, error_code="server_error", error=BUG)
        else:
            status = FAILED if wrong else COMPLETED
            code = INVALID if wrong else ""
            result = replace(result, status=status, error_code=code, error=wrong[:1_000])
        await self._objects.put(replace(result, at_ms=wall_ms()))

    async def _documents(
        self, store: VectorStore, entry: StoreEntry, result: StoreFileResult
    ) -> tuple[StoreFileResult, list[Document]]:
        """Return all documents of a file; their number is on the log before the first one. Raises
        Unusable."""
        spec = entry.spec
        if store.store_id not in self._declared:
            await self._sweeper.declare(store.store_id, declaration(store, wall_ms()))
            self._declared.add(store.store_id)
        file = self._objects.table.file(spec.tenant, spec.file_id)
        if file is None:
            raise Unusable(INVALID, "the file was deleted")
        parts = self._objects.read_parts(file)
        texts = await texts_of(file, parts, self._parse_ms, INDEX_PROCESS)
        documents = [
            document async for document in in_slices(documents_of(file, spec, texts, wall_ms()))
        ]
        usage = sum([len(document.text.encode()) async for document in in_slices(documents)])
        count = max(len(documents), result.documents)
        result = replace(result, documents=count, usage_bytes=usage, at_ms=wall_ms())
        await self._objects.put(result)
        return result, documents

    async def _write_and_wait(self, ingester: Ingester, documents: list[Document]) -> str:
        """Write documents and wait until all are indexed; return why the first refused one was
        refused."""
        embedded_next = asyncio.Semaphore(EMBEDDED_NEXT)
        indexed_next = asyncio.Semaphore(INDEXED_NEXT)
        refused, pending_documents = list[str](), len(documents)
        all_indexed = asyncio.get_running_loop().create_future()

        def on_indexed(reason: str) -> None:
            nonlocal pending_documents
            pending_documents -= 1
            refused.extend([reason] if reason else [])
            indexed_next.release()
            if not pending_documents and not all_indexed.done():
                all_indexed.set_result(None)

        for document in documents:
            await indexed_next.acquire()
            await embedded_next.acquire()
            await ingester.put(document, on_indexed, embedded_next.release)
            self._put.set()
        await all_indexed
        return refused[0] if refused else ""

    async def _remove(
        self, ingester: Ingester, store: VectorStore | None, entry: StoreEntry
    ) -> None:
        """Remove the documents of a file, and then its records."""
        spec, result = entry.spec, entry.result
        for number in range(result.documents if result is not None else 0):
            await ingester.delete(spec.store_id, document_id(spec.file_id, number))
        await ingester.flush()
        if store is not None and spec.target_state == CANCELLED:
            assert result is not None, "else nothing was to be done"
            result = replace(result, documents=0, usage_bytes=0, at_ms=wall_ms())
            await self._objects.put(result)
            return
        keys = [key_of(record) for record in (result, spec) if record is not None]
        await self._objects.drop(*keys)


def _target(store: VectorStore | None, entry: StoreEntry) -> tuple[int, bool]:
    """Return the revision, and whether the file is to be present."""
    return entry.spec.revision, store is not None and entry.spec.target_state == PRESENT
