"""A document that its worker falls on: it is done alone, and buried in the end."""

import asyncio
import contextlib
from typing import Any

import pytest
from aiokafka import ConsumerRecord

from schemas.errors import LeaseError
from schemas.settings import LogSettings
from streams.log import retry
from streams.log.faust.crash_notes import CRASHES_MAX
from tests.waits import until
from tests.workers.embed.bookshelf import bookshelf, worker
from workers.embed.documents import DocumentWork

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(900)]
POISON = b"books/poison"


class PoisonWatch:
    """Ends the worker session that begins the poison, as a stalled loop does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self.alone = 0, list[bool]()
        self.worker: Any = None
        handle = DocumentWork.handle

        async def fall(work: DocumentWork, record: ConsumerRecord) -> None:
            if record.key != POISON:
                await handle(work, record)
                return
            self.times += 1
            await until(lambda: self.worker is not None)  # it may begin before the test has it
            intake = self.worker._intake
            self.alone.append(sum(map(len, intake._tasks.values())) == 1)
            intake.group.fail(LeaseError("lost"))
            await asyncio.Event().wait()

        monkeypatch.setattr(DocumentWork, "handle", fall)
        monkeypatch.setattr(retry, "PAUSE_S", 0.01)


async def test_embedding_worker_dead_letters_document_after_crashes(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log counts the crashes over processes and over sessions of one process."""
    fallen = PoisonWatch(monkeypatch)
    async with bookshelf(kafka) as books:
        for number in range(12):
            await books.put(f"before{number}", f"Before, number {number}.")
        await books.put("poison", "Whoever reads this falls.")
        for number in range(12):
            await books.put(f"behind{number}", f"Behind, number {number}.")
        with contextlib.suppress(LeaseError):
            async with worker(kafka, "one") as fallen.worker:
                await until(lambda: fallen.times == CRASHES_MAX - 1)
        fallen.worker = None
        async with worker(kafka, "two") as fallen.worker:
            for number in range(12):
                await books.shows(f"before{number}", f"Before, number {number}.")
                await books.shows(f"behind{number}", f"Behind, number {number}.")

            async def is_buried() -> bool:
                return bool(await books.dead_letter_reasons("documents"))

            await until(is_buried)
        # Of the first ones another record may be the first of its partition.
        assert CRASHES_MAX <= fallen.times <= 2 * CRASHES_MAX and all(fallen.alone[-2:])
        (reason,) = await books.dead_letter_reasons("documents")
        assert "members began this record, and each was lost" in reason
