"""Answers that are kept for whoever asks the same again: looked up, kept, dropped.

Any gateway finds what any other has kept: entries are documents of a collection of their own, which
the retrieval pool holds. Nothing here fails a call. A lookup ends with its deadline; whatever goes
wrong is a miss. At every hit the documents that the answer cites are asked whether they still say
that; what cannot be asked is not served.
"""

import asyncio
import json
import logging
from dataclasses import dataclass

from schemas.errors import EmptyIndex, TriviumError, UnknownCollection, UnknownFilterField
from schemas.log.clock import wall_ms
from schemas.records import Passage
from streams.gateway.cache.entry import KEY_FIELD, UNTIL_FIELD, CacheEntry, document_of, parse_entry
from streams.gateway.cache.guard import asks_the_same
from streams.gateway.cache.query import CacheQuery
from streams.gateway.config import GatewaySettings
from streams.gateway.log.pool import RetrievalPool
from streams.gateway.metrics import Metrics

logger = logging.getLogger(__name__)
CANDIDATES = 4  # nearest entries that are looked at
_KEEP_MS = 10_000  # to have one kept; nobody waits


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
        except (UnknownCollection, UnknownFilterField, EmptyIndex):  # nothing was kept yet
            pass
        except (TriviumError, TimeoutError) as error:
            logger.info("no answer was looked up: %s: %s", type(error).__name__, error)
            outcome = "failed"
        except Exception:  # ours to mend, and no reason to fail a chat
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
        """Whether all documents that it cites say what they said; else it is dropped."""
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
    """Whether it is what is asked for, as far as it can tell by itself."""
    return (
        entry.key == query.key
        and entry.until_ms > wall_ms()
        and asks_the_same(entry.question, query.question)
    )
