"""What one gateway has kept, asked of another at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import NotReady, RecordError
from schemas.records import StoredFile
from schemas.settings import LogSettings
from streams.log.clients import LogProducer
from streams.openai.objects.log import ObjectLog
from streams.openai.objects.quota import Quota
from streams.openai.objects.table import STORED
from tests.waits import meanwhile, until

CODEC = Codec()


def file(file_id: str) -> StoredFile:
    return StoredFile(
        file_id=file_id,
        tenant="",
        filename="a.txt",
        purpose="assistants",
        bytes=1,
        created_ms=1,
        expires_ms=0,
        state=STORED,
        partition=0,
        parts=(0,),
    )


async def buried(record: ConsumerRecord, error: RecordError) -> None:
    raise AssertionError(record.offset) from error


@contextlib.asynccontextmanager
async def gateway(log: LogSettings, name: str) -> AsyncIterator[ObjectLog]:
    """One gateway's side, as it runs, once it has read what there was."""
    async with LogProducer(log, CODEC, durable=True, client_id=name) as producer:
        objects = ObjectLog(
            log,
            CODEC,
            gateway_id=name,
            quota=Quota(objects_max=99, bytes_max=99),
            wait_ms=60_000,
            producer=lambda: producer,
            bury=buried,
        )
        async with meanwhile(objects.read()):
            await until(lambda: objects.is_read)
            yield objects


@pytest.mark.kafka
async def test_object_log_catches_up_with_other_gateway(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, fold = asyncio.Event(), ObjectLog._fold

    async def late_fold(self: ObjectLog, *args: object) -> None:
        if self._client_id.startswith("g2"):
            await may_read.wait()
        await fold(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectLog, "_fold", late_fold)
    async with gateway(kafka, "g1") as first, gateway(kafka, "g2") as second:
        await first.put(file("file-1"))
        assert second.table.file("", "file-1") is None
        catch_up_task = asyncio.create_task(second.catch_up())
        may_read.set()
        await catch_up_task
        assert second.table.file("", "file-1") == file("file-1")


async def test_object_log_raises_not_ready_before_first_read() -> None:
    objects = ObjectLog(
        LogSettings(),
        CODEC,
        gateway_id="g",
        quota=Quota(objects_max=9, bytes_max=9),
        wait_ms=60_000,
        producer=lambda: None,
        bury=buried,
    )
    with pytest.raises(NotReady):
        await objects.catch_up()
