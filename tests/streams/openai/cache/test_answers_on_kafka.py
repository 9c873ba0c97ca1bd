"""Answers that are kept, on a broker with embedding and retrieval workers: kept by one gateway,
found by another, gone when what they cite is edited or somebody drops them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.errors import EmptyIndex
from schemas.records import Quoted
from schemas.settings import LogSettings
from streams.calls.config import GatewaySettings
from streams.calls.log.pool import LogPool
from streams.calls.metrics import Metrics
from streams.log.clock import wall_ms
from streams.openai.cache.answers import AnswerCache
from streams.openai.cache.entry import CacheEntry
from streams.openai.cache.query import CacheQuery
from tests.waits import until
from tests.workers.embed import bookshelf
from tests.workers.retrieval import retrieval_workers

WISH = CacheQuery(key="ab" * 16, question="Where is the ferry?", threshold=0.8, ttl_s=600)
SETTINGS = GatewaySettings(cache_wait_ms=20_000)


@asynccontextmanager
async def cache(log: LogSettings, name: str) -> AsyncIterator[AnswerCache]:
    pool = LogPool(log, retrieval_workers.CODEC, name, 20_000)
    try:
        yield AnswerCache(SETTINGS, pool, Metrics())
    finally:
        await pool.close()


def entry(*quoted: Quoted) -> CacheEntry:
    return CacheEntry(
        key=WISH.key, question=WISH.question, text="At pier 7.", finish_reason="stop",
        stop_reason="", usage={"total_tokens": 3}, retrieval=None, annotations=[],
        quoted=[(passage.document_id, passage.content) for passage in quoted], collection="books",
        created_ms=wall_ms(), until_ms=wall_ms() + 600_000,
    )  # fmt: skip


async def test_gateways_share_cached_answer_until_document_changes(
    kafka: LogSettings,
) -> None:
    async with (
        retrieval_workers.calm(),
        bookshelf.worker(kafka, "embeds"),
        retrieval_workers.worker(kafka, "holds"),
        bookshelf.bookshelf(kafka) as shelf,
        cache(kafka, "one") as first,
        cache(kafka, "other") as second,
    ):
        await shelf.put("pier", "The ferry leaves from pier 7.")
        await until(lambda: shelf_holds(shelf))
        content = (await shelf.passages())["books/pier"].content_hash
        quoted = Quoted(document_id="pier", content=content)
        await until(lambda: holds(first, quoted))  # else what cites it is dropped as outdated

        async def hit(tenant: str = "mine") -> bool:
            return await second.look_up(WISH, tenant) is not None

        async def keep() -> None:
            await first.store(WISH, entry(quoted), "mine")
            await until(hit)

        await keep()
        cache_hit = await second.look_up(WISH, "mine")
        assert cache_hit is not None and cache_hit.entry.text == "At pier 7."
        assert cache_hit.similarity > 0.99 and not await hit("yours")
        await second.evict(cache_hit.entry_id)

        async def missed() -> bool:
            return not await hit()

        await until(missed)
        await keep()
        await shelf.put("pier", "The ferry leaves from pier 8.")

        async def dropped() -> bool:
            """And applied: a lookup that fails has missed, too."""
            return await missed() and not await has_entries(second)

        await until(dropped)
        await shelf.put("pier", "The ferry leaves from pier 7.")  # it was dropped, not hidden
        await shelf.shows("pier", "The ferry leaves from pier 7.")
        assert await missed()


async def holds(answers: AnswerCache, quoted: Quoted) -> bool:
    """Whether the index has a document as it was quoted."""
    try:
        return not await answers._pool.check(
            [quoted], collection="books", tenant="mine", deadline_ms=wall_ms() + 20_000
        )
    except EmptyIndex:
        return False


async def has_entries(answers: AnswerCache) -> bool:
    """Whether any answer is in the collection, right or not."""
    search_options = {"collection": answers._collection, "mode": "vector", "tenant": "mine"}
    try:
        result = await answers._pool.search_text(
            WISH.question, deadline_ms=wall_ms() + 20_000, **search_options
        )
    except EmptyIndex:
        return False
    return bool(result.passages)


async def shelf_holds(shelf: bookshelf.Bookshelf) -> bool:
    return "books/pier" in await shelf.passages()
