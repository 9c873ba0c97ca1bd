"""Answers that are kept: before a chat goes to routers, one that fits is given; after it, its own
is kept. DELETE /v1/cache/{id} has one dropped. What is kept, and how it is found, is `cache`'s.
"""

from dataclasses import dataclass

from schemas.errors import NotFound
from schemas.log.clock import wall_ms
from streams.gateway.cache.answers import CacheHit
from streams.gateway.cache.entry import belongs_to, entry_of
from streams.gateway.cache.hit_writer import write_hit
from streams.gateway.cache.query import CacheQuery, cache_query
from streams.gateway.http.exchange import HttpExchange
from streams.gateway.request.conversation import Conversation
from streams.gateway.request.intake import CallIntake
from streams.gateway.state import Gateway
from streams.gateway.stream.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLookup:
    """An answer that is to be kept when it has ended well."""

    query: CacheQuery
    hit: CacheHit | None  # one that was kept before
    tenant: str
    has_retrieval: bool  # in documents

    def store(self, gateway: Gateway, stream: Stream, text: str) -> None:
        """Store the answer in the background, if it may serve other callers."""
        entry = entry_of(
            self.query, stream, text, has_retrieval=self.has_retrieval, now_ms=wall_ms()
        )
        if entry is not None:
            gateway.run_in_background(gateway.answers.store(self.query, entry, self.tenant))


async def look_up(
    gateway: Gateway, exchange: HttpExchange, intake: CallIntake
) -> CacheLookup | None:
    """What is kept for a chat, if it wishes that; raises InvalidRequest."""
    query = cache_query(intake, gateway.served, gateway.settings, exchange.tenant)
    if query is None:
        return None
    return CacheLookup(
        query=query,
        hit=await gateway.answers.look_up(query, exchange.tenant),
        tenant=exchange.tenant,
        has_retrieval=intake.search is not None,
    )


async def serve(
    gateway: Gateway,
    exchange: HttpExchange,
    lookup: CacheLookup,
    intake: CallIntake,
    conversation: Conversation,
) -> bool:
    """Write the answer that was found; returns whether there was one."""
    hit = lookup.hit
    if hit is None:
        return False
    await write_hit(
        exchange,
        hit,
        model=gateway.served.name,
        stream=intake.stream,
        include_usage=intake.include_usage,
        session_id=conversation.session_id,
    )
    gateway.remember(conversation, hit.entry.text)
    return True


async def evict(gateway: Gateway, entry_id: str, tenant: str) -> None:
    """Remove a cached answer; raises NotFound for an id of another tenant."""
    if not belongs_to(entry_id, tenant):
        raise NotFound(f"{entry_id[:64]}: not the id of an answer that is kept for this key")
    await gateway.answers.evict(entry_id)
