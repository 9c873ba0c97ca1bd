"""Vector stores end to end: real broker, real workers, the real `openai` package (issue 12, 3)."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from schemas.settings import LogSettings
from tests.streams.gateway.indexing.running import gateway, pools
from tests.workers.search.service.library import calm

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]
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
    """Issue 12, 3) `/v1/vector_stores` with files and search on top of `documents`."""
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
