"""Answers that are kept: before a chat goes to routers, one that fits is given; after it, its own
is kept. DELETE /v1/cache/{id} has one dropped. What is kept, and how it is found, is `cache`'s.
"""

from dataclasses import dataclass

from schemas.errors import NotFound
from schemas.log.clock import wall_ms
from streams.gateway.cache.answers import Hit
from streams.gateway.cache.entry import entry_of, is_of
from streams.gateway.cache.served import write_hit
from streams.gateway.cache.wish import CacheWish, cache_wish
from streams.gateway.http.exchange import Exchange
from streams.gateway.request.conversation import Conversation
from streams.gateway.request.intake import Intake
from streams.gateway.state import Gateway
from streams.gateway.stream.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """An answer that is to be kept when it has ended well."""

    wish: CacheWish
    hit: Hit | None  # one that was kept before
    tenant: str
    looked_up: bool  # in documents

    def keep(self, gateway: Gateway, stream: Stream, text: str) -> None:
        """In the background, if it is an answer for others."""
        entry = entry_of(self.wish, stream, text, looked_up=self.looked_up, now_ms=wall_ms())
        if entry is not None:
            gateway.run_in_background(gateway.answers.keep(self.wish, entry, self.tenant))


async def look_up(gateway: Gateway, exchange: Exchange, intake: Intake) -> Keeping | None:
    """What is kept for a chat, if it wishes that; raises InvalidRequest."""
    wish = cache_wish(intake, gateway.served, gateway.settings, exchange.tenant)
    if wish is None:
        return None
    return Keeping(
        wish=wish,
        hit=await gateway.answers.look_up(wish, exchange.tenant),
        tenant=exchange.tenant,
        looked_up=intake.search is not None,
    )


async def give(
    gateway: Gateway, exchange: Exchange, keeping: Keeping, intake: Intake, talk: Conversation
) -> bool:
    """Write the answer that was found; returns whether there was one."""
    hit = keeping.hit
    if hit is None:
        return False
    await write_hit(
        exchange,
        hit,
        model=gateway.served.name,
        stream=intake.stream,
        include_usage=intake.include_usage,
        session_id=talk.session_id,
    )
    gateway.remember(talk, hit.entry.text)
    return True


async def drop(gateway: Gateway, entry_id: str, tenant: str) -> None:
    """Have an answer given no more; raises NotFound for what is none of this tenant."""
    if not is_of(entry_id, tenant):
        raise NotFound(f"{entry_id[:64]}: not the id of an answer that is kept for this key")
    await gateway.answers.drop(entry_id)
