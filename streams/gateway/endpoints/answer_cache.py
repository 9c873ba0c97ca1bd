"""The response cache in the path of a chat: a lookup before the call, and a write after it.

`generate.py` looks a chat up before it goes to routers, and stores its answer after it has ended.
DELETE /v1/cache/{id} evicts an answer. `streams/openai/cache` decides what is cached and found.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from schemas.errors import NotFound
from streams.calls.ids import CHAT_PREFIX, Conversation
from streams.calls.request.intake import CallIntake
from streams.calls.stream.answers import usage_so_far
from streams.calls.stream.chunks import DONE, one_line_each
from streams.calls.stream.stream import Stream
from streams.gateway.http.delivery import STREAM_HEADERS
from streams.gateway.http.entry import HttpExchange
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
            gateway.calls.run_in_background(gateway.answers.store(self.query, entry, self.tenant))


async def look_up(
    gateway: Gateway, exchange: HttpExchange, intake: CallIntake
) -> CacheLookup | None:
    """Look a chat up in the response cache, or return None without it; raises InvalidRequest."""
    query = cache_query(intake, gateway.settings, exchange.tenant)
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
        model=intake.card.name,
        stream=intake.stream,
        include_usage=intake.include_usage,
        counts_always=intake.counts_always,
        session_id=conversation.session_id,
    )
    gateway.remember(conversation, hit.entry.text)
    return True


async def evict(gateway: Gateway, entry_id: str, tenant: str) -> None:
    """Evict a cached answer; raises NotFound for an id of another tenant."""
    if not belongs_to(entry_id, tenant):
        raise NotFound(f"{entry_id[:64]}: not the id of an answer that is kept for this key")
    await gateway.answers.evict(entry_id)


Json = dict[str, Any]


async def write_hit(
    exchange: HttpExchange,
    hit: CacheHit,
    *,
    model: str,
    stream: bool,
    include_usage: bool,
    counts_always: bool,
    session_id: str,
) -> None:
    """Write the whole answer, streamed if the call asks for it. With `counts_always`, every event
    of the stream has the usage so far."""
    head = {
        "id": CHAT_PREFIX + exchange.call_id,
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "created": exchange.arrived_ms // 1000,
        "model": model,
    }
    extension = _extension(exchange, hit, session_id)
    if not stream:
        body = orjson.dumps({**head, **_whole(hit), "trivium": extension})
        await exchange.send_whole(body, exchange.reply_headers)
        return
    headers = [*STREAM_HEADERS, *exchange.reply_headers]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    events = _events(head, hit, extension, include_usage, counts_always)
    written = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events) + DONE
    await exchange.send({"type": "http.response.body", "body": one_line_each(written)})


def _extension(exchange: HttpExchange, hit: CacheHit, session_id: str) -> Json:
    entry = hit.entry
    return {
        "request_id": exchange.call_id,
        "session_id": session_id,
        "cache": {
            "id": hit.entry_id,
            "similarity": round(hit.similarity, 4),
            "age_s": round(hit.age_s, 1),
        },
        **({"retrieval": entry.retrieval} if entry.retrieval else {}),
    }


def _citations(hit: CacheHit) -> Json:
    return {"annotations": hit.entry.annotations} if hit.entry.annotations else {}


def _ending(hit: CacheHit) -> Json:
    return {
        "logprobs": None,
        "finish_reason": hit.entry.finish_reason,
        "stop_reason": hit.entry.stop_reason or None,
    }


def _whole(hit: CacheHit) -> Json:
    message = {
        "role": "assistant",
        "content": hit.entry.text,
        "reasoning": None,
        **_citations(hit),
    }
    return {
        "choices": [{"index": 0, "message": message, **_ending(hit)}],
        "usage": hit.entry.usage,
        "prompt_logprobs": None,
    }


def _events(
    head: Json, hit: CacheHit, extension: Json, include_usage: bool, counts_always: bool
) -> list[Json]:
    usage, open_choice = hit.entry.usage, {"index": 0, "logprobs": None, "finish_reason": None}
    role = {**open_choice, "delta": {"role": "assistant", "content": ""}}
    text = {**open_choice, "delta": {"content": hit.entry.text}}
    last = {"index": 0, "delta": _citations(hit), **_ending(hit)}
    before: Json = {"usage": None} if include_usage else {}
    after = before
    if counts_always:
        prompt_tokens, completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        before = {"usage": usage_so_far(prompt_tokens, 0)}
        after = {"usage": usage_so_far(prompt_tokens, completion_tokens)}
    events = [
        {**head, "choices": [role], **before},
        {**head, "choices": [text], **after},
        {**head, "choices": [last], "trivium": extension, **after},
    ]
    if include_usage:
        events.append({**head, "choices": [], "usage": usage, "trivium": extension})
    return events
