"""Vector stores end to end: real broker, real workers, the real `openai` package."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiokafka import AIOKafkaConsumer

from schemas.settings import LogSettings
from streams.gateway.endpoints import vector_stores
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.openai.indexing import expiry
from streams.openai.objects.table import DAY_MS
from tests.streams.openai.indexing.kafka_gateway import gateway, pools
from tests.streams.parsing.pdfs import pdf_bytes
from tests.waits import until
from tests.workers.retrieval.retrieval_workers import calm

pytestmark = pytest.mark.kafka
FERRY = b"# Ferries\n\nThe Ondry ferry leaves from pier 7 every 12 minutes."
BREAD = b"Bread is made of flour, water and salt. The bakery opens at six."


@pytest.fixture(autouse=True)
async def _calm() -> AsyncIterator[None]:
    async with calm():
        yield


async def upload_file(ai: openai.AsyncOpenAI, name: str, data: bytes) -> str:
    return (await ai.files.create(file=(name, data), purpose="assistants")).id


async def search_store(ai: openai.AsyncOpenAI, store: str, query: str, **wishes: Any) -> list[Any]:
    page = await ai.vector_stores.search(store, query=query, **wishes)
    return list(page.data)


async def test_indexer_makes_files_searchable_and_removes_them(kafka: LogSettings) -> None:
    """`/v1/vector_stores` with files and search works on the topic `documents`."""
    async with pools(kafka), gateway(kafka, "g1") as g1, g1.ai() as ai:
        store = await ai.vector_stores.create(name="harbour", metadata={"town": "Ondry"})
        assert (store.status, store.file_counts.total) == ("completed", 0)
        assert await search_store(ai, store.id, "ferry") == []
        ferry, bread = (
            await upload_file(ai, "ferry.md", FERRY),
            await upload_file(ai, "bread.txt", BREAD),
        )
        attached = await ai.vector_stores.files.create_and_poll(
            ferry, vector_store_id=store.id, attributes={"year": 2020}, poll_interval_ms=20
        )
        assert (attached.status, attached.last_error) == ("completed", None)
        assert attached.usage_bytes == len(FERRY)
        (hit,) = await search_store(ai, store.id, "Ondry ferry pier")
        assert (hit.file_id, hit.filename, hit.attributes) == (ferry, "ferry.md", {"year": 2020})
        assert "pier 7" in hit.content[0].text and 0 < hit.score <= 1
        batch = await ai.vector_stores.file_batches.create_and_poll(
            store.id, file_ids=[bread], attributes={"year": 1999}, poll_interval_ms=20
        )
        assert (batch.status, batch.file_counts.completed) == ("completed", 1)
        old: Any = {"type": "lt", "key": "year", "value": 2000}
        assert {hit.file_id for hit in await search_store(ai, store.id, "ferry", filters=old)} == {
            bread
        }
        await ai.vector_stores.files.update(ferry, vector_store_id=store.id, attributes={"year": 1})
        changed = await ai.vector_stores.files.poll(
            ferry, vector_store_id=store.id, poll_interval_ms=20
        )
        assert (changed.status, changed.attributes) == ("completed", {"year": 1})
        names = {hit.file_id for hit in await search_store(ai, store.id, "ferry", filters=old)}
        assert names == {ferry, bread}
        (text,) = (await ai.vector_stores.files.content(ferry, vector_store_id=store.id)).data
        assert text.text == FERRY.decode()
        await ai.files.delete(ferry)
        assert {hit.file_id for hit in await search_store(ai, store.id, "ferry")} <= {bread}
        listed = [file.id async for file in ai.vector_stores.files.list(store.id)]
        assert listed == [bread], "a deleted file is in no store"
        await ai.vector_stores.delete(store.id)
        with pytest.raises(openai.NotFoundError, match="no such vector store"):
            await ai.vector_stores.search(store.id, query="bread")


async def test_indexer_reports_file_errors_and_indexes_others(kafka: LogSettings) -> None:
    """Damaged and empty files fail; long ones and JSON lines become several documents."""
    long = b"".join(b"Line %d of the long one.\n\n" % number for number in range(12_000))
    files = {
        "a.bin": (b"\0\1", "unsupported_file", "unknown kind of file"),
        "b.pdf": (b"no", "invalid_file", "expected a PDF"),
        "c.txt": (b" \n ", "invalid_file", "empty: expected a text with words"),
        "d.jsonl": (b'{"id": 1, "text": "One."}\n[]', "invalid_file", "line 2: expected a JSON"),
        "e.txt": (b"\xff\xfe\xff", "invalid_file", "expected text in UTF-16"),
        "f.pdf": (pdf_bytes("The paper is on pier nine."), "", ""),
        "g.jsonl": (b'{"id": 1, "text": "Crumbs."}\n{"id": 2, "text": "Toast."}', "", ""),
        "h.txt": (long, "", ""),
    }
    async with pools(kafka), gateway(kafka, "g1") as g1, g1.ai() as ai:
        store = await ai.vector_stores.create(name="odd")
        ids = {name: await upload_file(ai, name, data) for name, (data, _, _) in files.items()}
        batch = await ai.vector_stores.file_batches.create_and_poll(
            store.id, file_ids=list(ids.values()), poll_interval_ms=50
        )
        assert (batch.file_counts.failed, batch.file_counts.completed) == (5, 3)
        for name, (_, code, message) in files.items():
            file = await ai.vector_stores.files.retrieve(ids[name], vector_store_id=store.id)
            if code:
                assert file.status == "failed" and file.last_error is not None
                assert file.last_error.code == code and message in file.last_error.message
            else:
                assert (file.status, file.last_error) == ("completed", None)
        (hit,) = await search_store(ai, store.id, "paper pier nine", max_num_results=1)
        assert hit.file_id == ids["f.pdf"]
        (hit,) = await search_store(ai, store.id, "Line 11999 of the long one", max_num_results=1)
        assert hit.file_id == ids["h.txt"]
        final_store = await ai.vector_stores.retrieve(store.id)
        assert (final_store.status, final_store.file_counts.failed) == ("completed", 5)
        assert final_store.usage_bytes > len(long) - 100


async def test_next_gateway_finishes_indexing(kafka: LogSettings) -> None:
    """A gateway reads its own writes at once, another one soon; its failure loses no work."""
    async with gateway(kafka, "g2") as g2, g2.ai() as ai, g2.ai("two") as other_tenant:
        async with gateway(kafka, "g1") as g1, g1.ai() as first:
            store = await first.vector_stores.create(name="shared")
            ferry = await upload_file(first, "ferry.md", FERRY)
            await first.vector_stores.files.create(store.id, file_id=ferry)
            await until(lambda: knows(ai, store.id, "in_progress"))
            assert (await ai.files.content(ferry)).content == FERRY
            for call in (
                other_tenant.files.retrieve(ferry),
                other_tenant.vector_stores.search(store.id, query="a"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            await g1.die()  # before anybody could embed it
        async with pools(kafka):
            await until(lambda: knows(ai, store.id, "completed"))
            assert [hit.file_id for hit in await search_store(ai, store.id, "ferry")] == [ferry]
            async with gateway(kafka, "g3") as g3, g3.ai() as last:
                assert [hit.file_id for hit in await search_store(last, store.id, "ferry")] == [
                    ferry
                ]
                stays = await upload_file(last, "bread.txt", BREAD)
                await last.files.delete(ferry)
            await until(lambda: is_gone(kafka, ferry))
            assert [file.id async for file in ai.files.list()] == [stays]


async def knows(ai: openai.AsyncOpenAI, store: str, status: str) -> bool:
    """Whether a gateway has it that a store with a file is so far."""
    try:
        vector_store = await ai.vector_stores.retrieve(store)
    except openai.NotFoundError:
        return False
    return vector_store.status == status and vector_store.file_counts.total == 1


async def is_gone(log: LogSettings, file_id: str) -> bool:
    """Whether the log has neither the file's bytes nor its documents and passages."""
    leftovers = []
    for topic in ("files", "documents", "passages"):
        reader = AssignedReader(log, topic, range(log.document_partitions), client_id="audit")
        async with reader.reading("earliest"):
            last = {record.key: record.value for record in await reader.read_to_end()}
        leftovers += [key for key, value in last.items() if value and file_id.encode() in key]
    return not leftovers


async def test_file_batch_is_cancelled_and_store_deleted_without_embedder(
    kafka: LogSettings,
) -> None:
    async with gateway(kafka, "g1") as g1, g1.ai() as ai:
        store = await ai.vector_stores.create()
        ferry, bread = (
            await upload_file(ai, "ferry.md", FERRY),
            await upload_file(ai, "bread.txt", BREAD),
        )
        batch = await ai.vector_stores.file_batches.create(store.id, file_ids=[ferry, bread])
        assert (batch.status, batch.file_counts.in_progress) == ("in_progress", 2)
        batch = await ai.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
        assert (batch.status, batch.file_counts.cancelled) == ("cancelled", 2)
        file = await ai.vector_stores.files.create(store.id, file_id=ferry)
        assert file.status == "in_progress", "it may be put in again"
        await ai.vector_stores.delete(store.id)
        await until(lambda: has_objects(kafka, ferry, bread))
        for file_id in (ferry, bread):
            await until(lambda name=file_id: has_no_documents(kafka, name))


async def test_indexer_cancels_file_while_reading_its_bytes(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader may be closing, which aiokafka does not allow to cancel."""
    closing, stop = asyncio.Event(), AIOKafkaConsumer.stop

    async def stop_slowly(consumer: AIOKafkaConsumer) -> None:
        if consumer.assignment() and not closing.is_set() and is_indexing():
            closing.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await stop(consumer)

    def is_indexing() -> bool:
        return any("Indexer._index at" in repr(task.get_coro()) for task in asyncio.all_tasks())

    monkeypatch.setattr(AIOKafkaConsumer, "stop", stop_slowly)
    async with gateway(kafka, "g1") as g1, g1.ai() as ai:
        store = await ai.vector_stores.create()
        ferry = await upload_file(ai, "ferry.md", FERRY)
        await ai.vector_stores.files.create(store.id, file_id=ferry)
        await closing.wait()
        await ai.vector_stores.delete(store.id)
        await until(lambda: has_objects(kafka, ferry))


async def has_objects(log: LogSettings, *names: str) -> bool:
    """Whether these files, and nothing else, are kept."""
    reader = AssignedReader(log, "objects", [0], client_id="audit")
    async with reader.reading("earliest"):
        last = {record.key.decode(): record.value for record in await reader.read_to_end()}
    return {key.partition("/")[2] for key, value in last.items() if value} == set(names)


async def has_no_documents(log: LogSettings, file_id: str) -> bool:
    reader = AssignedReader(log, "documents", range(log.document_partitions), client_id="audit")
    async with reader.reading("earliest"):
        last = {record.key: record.value for record in await reader.read_to_end()}
    return not any(value and file_id.encode() in key for key, value in last.items())


async def test_expired_files_and_stores_are_deleted(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(kafka, "g1") as g1, g1.ai() as ai:
        store = await ai.vector_stores.create(expires_after={"anchor": "last_active_at", "days": 1})
        lasting = await upload_file(ai, "bread.txt", BREAD)
        short = await ai.files.create(
            file=("ferry.md", FERRY),
            purpose="assistants",
            expires_after={"anchor": "created_at", "seconds": 3_600},
        )
        await ai.vector_stores.files.create(store.id, file_id=lasting)
        monkeypatch.setattr(expiry, "wall_ms", lambda: wall_ms() + 2 * DAY_MS)
        monkeypatch.setattr(vector_stores, "wall_ms", lambda: wall_ms() + 2 * DAY_MS)

        async def is_so() -> bool:
            vector_store = await ai.vector_stores.retrieve(store.id)
            files = [file.id async for file in ai.files.list()]
            return (vector_store.status, vector_store.file_counts.total, files) == (
                "expired",
                0,
                [lasting],
            )

        await until(is_so)
        assert short.expires_at is not None
        with pytest.raises(openai.BadRequestError, match="it has expired"):
            await ai.vector_stores.search(store.id, query="bread")
