"""The response cache in the path of a chat: a lookup before the call, and a write after it.

`generate.py` looks a chat up before it goes to routers, and stores its answer after it has ended.
DELETE /v1/cache/{id} evicts an answer. `streams/openai/cache` decides what is cached and found.
"""

from dataclasses import dataclass

from schemas.errors import NotFound
from streams.calls.request.conversation import Conversation
from streams.calls.request.intake import CallIntake
from streams.calls.stream.stream import Stream
from streams.gateway.endpoints.hit_writer import write_hit
from streams.gateway.http.exchange import HttpExchange
from streams.gateway.state import Gateway
from streams.log.clock import wall_ms
from streams.openai.cache.answers import CacheHit
from streams.openai.cache.entry import belongs_to, entry_of
from streams.openai.cache.query import CacheQuery, cache_query


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLookup:
    """A chat's lookup in the response cache, and what is needed to store its own answer."""

    query: CacheQuery
    hit: CacheHit | None  # a cached answer
    tenant: str
    has_retrieval: bool  # whether the chat searches documents

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
    """Look a chat up in the response cache, or return None without it; raises InvalidRequest."""
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
    """Write the cached answer, if there is one; return whether there was."""
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
    """Evict a cached answer; raises NotFound for an id of another tenant."""
    if not belongs_to(entry_id, tenant):
        raise NotFound(f"{entry_id[:64]}: not the id of an answer that is kept for this key")
    await gateway.answers.evict(entry_id)
