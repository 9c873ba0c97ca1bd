"""Writes a cached answer, whole or as a stream of a few events.

The events have no ids, as there is nothing on the log to resume. A client that was cut off sends
its call again.
"""

from typing import Any

import orjson

from streams.calls.ids import CHAT_PREFIX
from streams.calls.stream.chunks import DONE, one_line_each
from streams.gateway.http.delivery import STREAM_HEADERS
from streams.gateway.http.exchange import HttpExchange
from streams.openai.cache.answers import CacheHit

Json = dict[str, Any]


async def write_hit(
    exchange: HttpExchange,
    hit: CacheHit,
    *,
    model: str,
    stream: bool,
    include_usage: bool,
    session_id: str,
) -> None:
    """Write the whole answer, streamed if the call asks for it."""
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
    events = _events(head, hit, extension, include_usage)
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
    message = {"role": "assistant", "content": hit.entry.text, **_citations(hit)}
    return {
        "choices": [{"index": 0, "message": message, **_ending(hit)}],
        "usage": hit.entry.usage,
        "prompt_logprobs": None,
    }


def _events(head: Json, hit: CacheHit, extension: Json, include_usage: bool) -> list[Json]:
    open_choice = {"index": 0, "logprobs": None, "finish_reason": None}
    role = {**open_choice, "delta": {"role": "assistant", "content": ""}}
    text = {**open_choice, "delta": {"content": hit.entry.text}}
    last = {"index": 0, "delta": _citations(hit), **_ending(hit)}
    usage: Json = {"usage": None} if include_usage else {}
    events = [
        {**head, "choices": [role], **usage},
        {**head, "choices": [text], **usage},
        {**head, "choices": [last], "trivium": extension, **usage},
    ]
    if include_usage:
        events.append({**head, "choices": [], "usage": hit.entry.usage, "trivium": extension})
    return events
