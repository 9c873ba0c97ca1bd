"""Vector stores end to end: real broker, real workers, the real `openai` package."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiokafka import AIOKafkaConsumer

from schemas.log.clients import AssignedReader
from schemas.log.clock import wall_ms
from schemas.settings import LogSettings
from streams.gateway.endpoints import vector_stores
from streams.gateway.indexing import expiry
from streams.gateway.objects.table import DAY_MS
from tests.streams.gateway.indexing.running import gateway, pools
from tests.streams.parsing.pdfs import pdf_bytes
from tests.waiting import until
from tests.workers.search.service.library import calm

pytestmark = pytest.mark.kafka
FERRY = b"# Ferries\n\nThe Ondry ferry leaves from pier 7 every 12 minutes."
BREAD = b"Bread is made of flour, water and salt. The bakery opens at six."


@pytest.fixture(autouse=True)
async def _calm() -> AsyncIterator[None]:
    async with calm():
        yield


async def kept(ai: openai.AsyncOpenAI, name: str, data: bytes) -> str:
    return (await ai.files.create(file=(name, data), purpose="assistants")).id


async def found(ai: openai.AsyncOpenAI, store: str, query: str, **wishes: Any) -> list[Any]:
    page = await ai.vector_stores.search(store, query=query, **wishes)
    return list(page.data)


async def test_files_become_searchable_and_go(kafka: LogSettings) -> None:
    """`/v1/vector_stores` with files and search on top of `documents`."""
    async with pools(kafka), gateway(kafka, "g1") as one, one.ai() as ai:
        store = await ai.vector_stores.create(name="harbour", metadata={"town": "Ondry"})
        assert (store.status, store.file_counts.total) == ("completed", 0)
        assert await found(ai, store.id, "ferry") == []
        ferry, bread = await kept(ai, "ferry.md", FERRY), await kept(ai, "bread.txt", BREAD)
        attached = await ai.vector_stores.files.create_and_poll(
            ferry, vector_store_id=store.id, attributes={"year": 2020}, poll_interval_ms=20
        )
        assert (attached.status, attached.last_error) == ("completed", None)
        assert attached.usage_bytes == len(FERRY)
        (hit,) = await found(ai, store.id, "Ondry ferry pier")
        assert (hit.file_id, hit.filename, hit.attributes) == (ferry, "ferry.md", {"year": 2020})
        assert "pier 7" in hit.content[0].text and 0 < hit.score <= 1
        batch = await ai.vector_stores.file_batches.create_and_poll(
            store.id, file_ids=[bread], attributes={"year": 1999}, poll_interval_ms=20
        )
        assert (batch.status, batch.file_counts.completed) == ("completed", 1)
        old: Any = {"type": "lt", "key": "year", "value": 2000}
        assert {each.file_id for each in await found(ai, store.id, "ferry", filters=old)} == {bread}
        await ai.vector_stores.files.update(ferry, vector_store_id=store.id, attributes={"year": 1})
        changed = await ai.vector_stores.files.poll(
            ferry, vector_store_id=store.id, poll_interval_ms=20
        )
        assert (changed.status, changed.attributes) == ("completed", {"year": 1})
        names = {each.file_id for each in await found(ai, store.id, "ferry", filters=old)}
        assert names == {ferry, bread}
        (text,) = (await ai.vector_stores.files.content(ferry, vector_store_id=store.id)).data
        assert text.text == FERRY.decode()
        await ai.files.delete(ferry)
        assert {each.file_id for each in await found(ai, store.id, "ferry")} <= {bread}
        listed = [each.id async for each in ai.vector_stores.files.list(store.id)]
        assert listed == [bread], "a deleted file is in no store"
        await ai.vector_stores.delete(store.id)
        with pytest.raises(openai.NotFoundError, match="no such vector store"):
            await ai.vector_stores.search(store.id, query="bread")


async def test_what_is_wrong_with_a_file_is_told(kafka: LogSettings) -> None:
    """Unknown kind, damaged, empty: it failed, and the others are there; long ones and lines of
    JSON are several documents."""
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
    async with pools(kafka), gateway(kafka, "g1") as one, one.ai() as ai:
        store = await ai.vector_stores.create(name="odd")
        ids = {name: await kept(ai, name, data) for name, (data, _, _) in files.items()}
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
        (hit,) = await found(ai, store.id, "paper pier nine", max_num_results=1)
        assert hit.file_id == ids["f.pdf"]
        (hit,) = await found(ai, store.id, "Line 11999 of the long one", max_num_results=1)
        assert hit.file_id == ids["h.txt"]
        told = await ai.vector_stores.retrieve(store.id)
        assert (told.status, told.file_counts.failed) == ("completed", 5)
        assert told.usage_bytes > len(long) - 100


async def test_any_gateway_answers_and_the_next_one_goes_on(kafka: LogSettings) -> None:
    """Read your writes here, soon elsewhere; nothing is lost with a gateway, nor its work."""
    async with gateway(kafka, "g2") as two, two.ai() as ai, two.ai("two") as other:
        async with gateway(kafka, "g1") as one, one.ai() as first:
            store = await first.vector_stores.create(name="shared")
            ferry = await kept(first, "ferry.md", FERRY)
            await first.vector_stores.files.create(store.id, file_id=ferry)
            await until(lambda: knows(ai, store.id, "in_progress"))
            assert (await ai.files.content(ferry)).content == FERRY
            for call in (
                other.files.retrieve(ferry),
                other.vector_stores.search(store.id, query="a"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            await one.die()  # before anybody could embed it
        async with pools(kafka):
            await until(lambda: knows(ai, store.id, "completed"))
            assert [each.file_id for each in await found(ai, store.id, "ferry")] == [ferry]
            async with gateway(kafka, "g3") as three, three.ai() as last:
                assert [each.file_id for each in await found(last, store.id, "ferry")] == [ferry]
                stays = await kept(last, "bread.txt", BREAD)
                await last.files.delete(ferry)
            await until(lambda: is_gone(kafka, ferry))
            assert [each.id async for each in ai.files.list()] == [stays]


async def knows(ai: openai.AsyncOpenAI, store: str, status: str) -> bool:
    """Whether a gateway has it that a store with a file is so far."""
    try:
        told = await ai.vector_stores.retrieve(store)
    except openai.NotFoundError:
        return False
    return told.status == status and told.file_counts.total == 1


async def is_gone(log: LogSettings, file_id: str) -> bool:
    """Whether the log has neither the file's bytes nor its documents and passages."""
    left = []
    for topic in ("files", "documents", "passages"):
        reader = AssignedReader(log, topic, range(log.document_partitions), client_id="audit")
        async with reader.reading("earliest"):
            last = {each.key: each.value for each in await reader.read_to_end()}
        left += [key for key, value in last.items() if value and file_id.encode() in key]
    return not left


async def test_a_batch_is_cancelled_and_a_store_deleted_while_nothing_embeds(
    kafka: LogSettings,
) -> None:
    async with gateway(kafka, "g1") as one, one.ai() as ai:
        store = await ai.vector_stores.create()
        ferry, bread = await kept(ai, "ferry.md", FERRY), await kept(ai, "bread.txt", BREAD)
        batch = await ai.vector_stores.file_batches.create(store.id, file_ids=[ferry, bread])
        assert (batch.status, batch.file_counts.in_progress) == ("in_progress", 2)
        batch = await ai.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
        assert (batch.status, batch.file_counts.cancelled) == ("cancelled", 2)
        again = await ai.vector_stores.files.create(store.id, file_id=ferry)
        assert again.status == "in_progress", "it may be put in again"
        await ai.vector_stores.delete(store.id)
        await until(lambda: has_objects(kafka, ferry, bread))
        for file_id in (ferry, bread):
            await until(lambda name=file_id: has_no_documents(kafka, name))


async def test_a_file_is_given_up_while_its_bytes_are_read(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its reader may be closing, which aiokafka does not let anybody cancel."""
    closing, stop = asyncio.Event(), AIOKafkaConsumer.stop

    async def stop_slowly(consumer: AIOKafkaConsumer) -> None:
        if consumer.assignment() and not closing.is_set() and is_indexing():
            closing.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await stop(consumer)

    def is_indexing() -> bool:
        return any("Indexer._index at" in repr(each.get_coro()) for each in asyncio.all_tasks())

    monkeypatch.setattr(AIOKafkaConsumer, "stop", stop_slowly)
    async with gateway(kafka, "g1") as one, one.ai() as ai:
        store = await ai.vector_stores.create()
        ferry = await kept(ai, "ferry.md", FERRY)
        await ai.vector_stores.files.create(store.id, file_id=ferry)
        await closing.wait()
        await ai.vector_stores.delete(store.id)
        await until(lambda: has_objects(kafka, ferry))


async def has_objects(log: LogSettings, *names: str) -> bool:
    """Whether these files, and nothing else, are kept."""
    reader = AssignedReader(log, "objects", [0], client_id="audit")
    async with reader.reading("earliest"):
        last = {each.key.decode(): each.value for each in await reader.read_to_end()}
    return {key.partition("/")[2] for key, value in last.items() if value} == set(names)


async def has_no_documents(log: LogSettings, file_id: str) -> bool:
    reader = AssignedReader(log, "documents", range(log.document_partitions), client_id="audit")
    async with reader.reading("earliest"):
        last = {each.key: each.value for each in await reader.read_to_end()}
    return not any(value and file_id.encode() in key for key, value in last.items())


async def test_what_expires_goes(kafka: LogSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(kafka, "g1") as one, one.ai() as ai:
        store = await ai.vector_stores.create(expires_after={"anchor": "last_active_at", "days": 1})
        lasting = await kept(ai, "bread.txt", BREAD)
        short = await ai.files.create(
            file=("ferry.md", FERRY),
            purpose="assistants",
            expires_after={"anchor": "created_at", "seconds": 3_600},
        )
        await ai.vector_stores.files.create(store.id, file_id=lasting)
        monkeypatch.setattr(expiry, "wall_ms", lambda: wall_ms() + 2 * DAY_MS)
        monkeypatch.setattr(vector_stores, "wall_ms", lambda: wall_ms() + 2 * DAY_MS)

        async def is_so() -> bool:
            told = await ai.vector_stores.retrieve(store.id)
            files = [each.id async for each in ai.files.list()]
            return (told.status, told.file_counts.total, files) == ("expired", 0, [lasting])

        await until(is_so)
        assert short.expires_at is not None
        with pytest.raises(openai.BadRequestError, match="it has expired"):
            await ai.vector_stores.search(store.id, query="bread")
