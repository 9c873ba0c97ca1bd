"""POST /v1/chat/completions and /v1/completions: from the call to the answer.

A call with `Last-Event-ID` resumes a stream instead (`resume.py`). `streams/calls` checks the call,
and sends its requests; here their tokens become an answer.
"""

import asyncio
from collections.abc import Awaitable, Callable

from schemas.records import CancelReason, Endpoint
from streams.calls.ids import Conversation
from streams.calls.request.intake import CallIntake, take_in
from streams.calls.requests import Inquiry, accept, options_of
from streams.calls.stream.chunks import ChunkWriter, whole_answer
from streams.calls.stream.hub import Call
from streams.calls.stream.parsed import ParsedAnswer, answer_of
from streams.gateway.endpoints import answer_cache
from streams.gateway.endpoints.answer_cache import CacheLookup
from streams.gateway.endpoints.resume import RESUME_HEADER, last_event, resume
from streams.gateway.http.delivery import CLIENT_GONE, COMPLETED, write_stream, write_whole
from streams.gateway.http.entry import HttpExchange
from streams.gateway.state import Gateway


async def generate(gateway: Gateway, endpoint: Endpoint, exchange: HttpExchange) -> str:
    """Answer a chat or completion; return the outcome, raise the errors for the caller."""
    calls, settings = gateway.calls, gateway.settings
    exchange.begin(gateway.callers)
    tenant, headers = exchange.tenant, exchange.headers
    if RESUME_HEADER in headers:
        key, positions = last_event(gateway, exchange)
        await exchange.read_body(gateway.callers.body_reader)
        return await resume(gateway, exchange, key, positions)
    await calls.admit(tenant)  # before the body takes memory
    raw = await exchange.read_body(gateway.callers.body_reader)
    intake = await take_in(raw, endpoint, gateway.models, settings, tenant)
    conversation = conversation_of(gateway, exchange, intake)
    exchange.reply_headers.append((b"x-session-id", conversation.session_id.encode()))
    inquiry = Inquiry(
        intake=intake,
        options=options_of(headers, exchange.arrived_ms, intake, settings),
        conversation=conversation,
    )
    lookup = None
    if settings.cache_for or intake.names_cache:
        lookup = await answer_cache.look_up(gateway, exchange, intake)
        if lookup and await answer_cache.serve(gateway, exchange, lookup, intake, conversation):
            return COMPLETED
    call = await accept(calls, exchange, inquiry)
    exchange.reply_headers.append((b"x-trivium-request-id", exchange.call_id.encode()))

    async def write() -> str:
        if call.waits_for_end:
            return await _write_whole(gateway, exchange, inquiry, lookup, call)
        return await _write_stream(gateway, exchange, inquiry, lookup, call)

    return await answer(gateway, exchange, call, write, keeps_running=inquiry.options.keeps_running)


def conversation_of(gateway: Gateway, exchange: HttpExchange, intake: CallIntake) -> Conversation:
    """Return the conversation that a call continues; raises InvalidRequest for its header."""
    return gateway.conversations.of_call(
        exchange.headers,
        intake.session_id,
        intake.chat.turns,
        tenant=exchange.tenant,
        user=intake.user,
        now_ms=exchange.arrived_ms,
    )


async def answer(
    gateway: Gateway,
    exchange: HttpExchange,
    call: Call,
    write: Callable[[], Awaitable[str]],
    *,
    keeps_running: bool,
) -> str:
    """Write the answer until it ends, or until its client disconnects; return the outcome.

    A stream that a stopping gateway cuts off is not cancelled: its client may resume it elsewhere.
    """
    calls = gateway.calls
    watcher = exchange.on_hang_up(call.hang_up)
    outcome, is_cut_off = "", False
    try:
        outcome = await write()
    except asyncio.CancelledError:
        is_cut_off = calls.draining and not call.waits_for_end
        raise
    finally:
        watcher.cancel()
        if outcome == CLIENT_GONE and (keeps_running or calls.is_resumed(call)):
            calls.detach(call)
        else:
            calls.release(call)
            if outcome != COMPLETED and not is_cut_off:
                calls.cancel_later(call, CancelReason.CLIENT_GONE)
    return outcome


async def _write_stream(
    gateway: Gateway,
    exchange: HttpExchange,
    inquiry: Inquiry,
    lookup: CacheLookup | None,
    call: Call,
) -> str:
    intake = inquiry.intake
    writer = ChunkWriter(
        call.key,
        call.streams,
        name=gateway.event_ids.name(call.key) if inquiry.options.event_ids else b"",
        prompts=intake.reported_prompts,
        counts_always=intake.counts_always,
        names_reasoning_content=gateway.settings.reasoning_content,
        echoes=call.echoes,
    )
    if (inquiry.conversation.digest or lookup) and call.key.choices == 1:
        writer.collected = ParsedAnswer()
    outcome = await write_stream(exchange, call, writer)
    if outcome == COMPLETED and writer.collected is not None:
        _remember(gateway, inquiry, lookup, call, writer.collected)
    return outcome


async def _write_whole(
    gateway: Gateway,
    exchange: HttpExchange,
    inquiry: Inquiry,
    lookup: CacheLookup | None,
    call: Call,
) -> str:
    prompts = inquiry.intake.reported_prompts
    has_both = gateway.settings.reasoning_content
    outcome = await write_whole(
        exchange,
        call,
        lambda: whole_answer(
            call.key,
            call.streams,
            prompts,
            names_reasoning_content=has_both,
            echoes=call.echoes,
        ),
    )
    if outcome == COMPLETED and call.key.choices == 1:
        _remember(gateway, inquiry, lookup, call, answer_of(call.streams[0]))
    return outcome


def _remember(
    gateway: Gateway,
    inquiry: Inquiry,
    lookup: CacheLookup | None,
    call: Call,
    answer: ParsedAnswer,
) -> None:
    """Remember an answer for the conversation's next turn, and store it in the response cache."""
    gateway.remember(inquiry.conversation, answer.content, answer.call_texts)
    if lookup is not None:
        lookup.store(gateway, call.streams[0], answer.content)
