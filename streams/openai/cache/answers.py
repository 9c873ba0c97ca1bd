"""The response cache: looks up, stores and evicts answers for later callers with the same question.

Any gateway finds the answers of all others: entries are documents of a separate collection in the
retrieval pool. The cache never fails a call. A lookup ends at its deadline; any failure is a miss.
At every hit, the retrieval pool checks that the documents that the answer cites are unchanged; if
that cannot be checked, the answer is not served.
"""

import asyncio
import json
import logging
from dataclasses import dataclass

from schemas.errors import EmptyIndex, TriviumError, UnknownCollection, UnknownFilterField
from schemas.records import Passage
from streams.calls.config import GatewaySettings
from streams.calls.log.pool import RetrievalPool
from streams.calls.metrics import Metrics
from streams.log.clock import wall_ms
from streams.openai.cache.entry import KEY_FIELD, UNTIL_FIELD, CacheEntry, document_of, parse_entry
from streams.openai.cache.guard import asks_the_same
from streams.openai.cache.query import CacheQuery

logger = logging.getLogger(__name__)
CANDIDATES = 4  # nearest entries that are checked
_KEEP_MS = 10_000  # to store an answer; no call waits


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit:
    """A cached answer that fits a query."""

    entry_id: str
    entry: CacheEntry
    similarity: float
    age_s: float


class AnswerCache:
    """Looks up and stores answers of chats for one gateway."""

    def __init__(self, settings: GatewaySettings, pool: RetrievalPool, metrics: Metrics) -> None:
        self._settings, self._pool, self._metrics = settings, pool, metrics
        self._collection = settings.cache_collection

    async def look_up(self, query: CacheQuery, tenant: str) -> CacheHit | None:
        """Find a cached answer within `cache_wait_ms`; never raises."""
        hit, outcome, wait_ms = None, "miss", self._settings.cache_wait_ms
        try:
            async with asyncio.timeout(wait_ms / 1000):
                hit = await self._find(query, tenant, wall_ms() + wait_ms)
        except (UnknownCollection, UnknownFilterField, EmptyIndex):  # nothing is cached yet
            pass
        except (TriviumError, TimeoutError) as error:
            logger.info("no answer was looked up: %s: %s", type(error).__name__, error)
            outcome = "failed"
        except Exception:  # a bug must not fail the chat
            logger.exception("no answer was looked up")
            outcome = "failed"
        self._metrics.cache_lookup("hit" if hit else outcome)
        return hit

    async def _find(self, query: CacheQuery, tenant: str, deadline_ms: int) -> CacheHit | None:
        where = {KEY_FIELD: query.number, UNTIL_FIELD: {"$gt": wall_ms()}}
        answer = await self._pool.search_text(
            query.question,
            collection=self._collection,
            k=CANDIDATES,
            mode="vector",
            filter=json.dumps(where),
            min_score=query.threshold,
            tenant=tenant,
            deadline_ms=deadline_ms,
        )
        for passage in answer.passages:
            entry = parse_entry(passage.text)
            if entry is None or not _fits(entry, query):
                continue
            if await self._still_holds(entry, passage, tenant, deadline_ms):
                age_s = max(0, wall_ms() - entry.created_ms) / 1000
                return CacheHit(
                    entry_id=passage.document_id,
                    entry=entry,
                    similarity=passage.score,
                    age_s=age_s,
                )
        return None

    async def _still_holds(
        self, entry: CacheEntry, passage: Passage, tenant: str, deadline_ms: int
    ) -> bool:
        """Return whether all documents that an entry cites are unchanged; evict the entry
        otherwise."""
        if not entry.quoted:
            return True
        changed = await self._pool.check(
            entry.documents, collection=entry.collection, tenant=tenant, deadline_ms=deadline_ms
        )
        if changed:
            self._metrics.cache_lookup("changed")
            await self._pool.remove(self._collection, passage.document_id)
        return not changed

    async def store(self, query: CacheQuery, entry: CacheEntry, tenant: str) -> None:
        """Store an answer for later queries; never raises."""
        try:
            embedded_texts = await self._pool.embed(
                [query.question], deadline_ms=wall_ms() + _KEEP_MS, tenant=tenant
            )
            document = document_of(
                entry,
                embedded_texts.vectors[0],
                collection=self._collection,
                tenant=tenant,
                number=query.number,
                entries_max=self._settings.cache_entries_max,
            )
            if document is not None:
                await self._pool.write(document)
        except TriviumError as error:
            logger.info("an answer was not kept: %s: %s", type(error).__name__, error)
        except Exception:
            logger.exception("an answer was not kept")

    async def evict(self, entry_id: str) -> None:
        """Remove an entry from the cache; raises BrokerUnavailable."""
        await self._pool.remove(self._collection, entry_id)


def _fits(entry: CacheEntry, query: CacheQuery) -> bool:
    """Return whether an entry answers a query, by its own fields."""
    return (
        entry.key == query.key
        and entry.until_ms > wall_ms()
        and asks_the_same(entry.question, query.question)
    )
