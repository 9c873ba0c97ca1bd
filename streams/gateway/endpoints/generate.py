"""POST /v1/chat/completions and /v1/completions: a call becomes requests, tokens become an answer.

Each choice is one request on the log. A call is accepted when the broker has acknowledged all of
its requests; if something fails before that, the client has to retry. A call with `Last-Event-ID`
resumes a stream instead (`resume.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from schemas.records import CancelReason, Endpoint, Request, Retrieval
from schemas.rules import trace
from schemas.rules.tokens import pack_tokens
from schemas.rules.trace import trace_of
from streams.calls.ids import Conversation, choice_ids, new_request_id, session_of
from streams.calls.request.intake import CallIntake, take_in
from streams.calls.request.options import CallOptions, options_of
from streams.calls.stream.chunks import ChunkWriter, whole_answer
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call
from streams.calls.wishes import check_wishes
from streams.gateway.endpoints import answer_cache
from streams.gateway.endpoints.answer_cache import CacheLookup
from streams.gateway.endpoints.resume import RESUME_HEADER, last_event, resume
from streams.gateway.http.delivery import CLIENT_GONE, COMPLETED, write_stream, write_whole
from streams.gateway.http.exchange import HttpExchange
from streams.gateway.state import Gateway
from streams.log.clients import Headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A checked call: its body, its options, and its conversation."""

    intake: CallIntake
    options: CallOptions
    conversation: Conversation
    cache_lookup: CacheLookup | None = None  # if the answer may be cached


async def generate(gateway: Gateway, endpoint: Endpoint, exchange: HttpExchange) -> str:
    """Answer a chat or completion; return the outcome, raise the errors for the caller."""
    exchange.call_id = new_request_id(exchange.arrived_ms)
    exchange.reply_headers.append((b"x-request-id", exchange.call_id.encode()))
    exchange.tenant = gateway.keys.tenant(exchange.headers)
    if RESUME_HEADER in exchange.headers:
        key, positions = last_event(gateway, exchange)
        await exchange.read_body(gateway.body_reader)
        return await resume(gateway, exchange, key, positions)
    await gateway.admit(exchange.tenant)  # before the body takes memory
    raw = await exchange.read_body(gateway.body_reader)
    intake = await take_in(raw, endpoint, gateway.served, gateway.settings, exchange.tenant)
    conversation = conversation_of(gateway, exchange, intake)
    exchange.reply_headers.append((b"x-session-id", conversation.session_id.encode()))
    options = options_of(exchange.headers, exchange.arrived_ms, intake, gateway.settings)
    cache_lookup = await answer_cache.look_up(gateway, exchange, intake)
    if cache_lookup and await answer_cache.serve(
        gateway, exchange, cache_lookup, intake, conversation
    ):
        return COMPLETED
    inquiry = Inquiry(
        intake=intake, options=options, conversation=conversation, cache_lookup=cache_lookup
    )
    call = await accept(gateway, exchange, inquiry)
    exchange.reply_headers.append((b"x-trivium-request-id", exchange.call_id.encode()))

    async def write() -> str:
        if call.waits_for_end:
            return await _write_whole(gateway, exchange, inquiry, call)
        return await _write_stream(gateway, exchange, inquiry, call)

    return await answer(gateway, exchange, call, write, keeps_running=options.keeps_running)


def conversation_of(gateway: Gateway, exchange: HttpExchange, intake: CallIntake) -> Conversation:
    """Return the conversation of a call: by header, by the session id in its body, or by its
    messages."""
    messages = intake.chat.messages
    session_id = session_of(exchange.headers) or intake.session_id
    if session_id:
        turn = sum(message["role"] == "assistant" for message in messages)
        return Conversation(session_id=session_id, turn=turn)
    scope = f"{len(exchange.tenant)}:{exchange.tenant}{intake.user}"
    return gateway.conversations.find(scope, messages, exchange.arrived_ms)


async def accept(gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry) -> Call:
    """Send the call's requests, and wait until the broker has acknowledged them all."""
    intake = inquiry.intake
    await gateway.admit(exchange.tenant, choices := len(intake.prompts) * intake.n)
    key = _stream_key(gateway, exchange, inquiry, choices)
    requests = requests_of(gateway, inquiry, key, exchange.arrived_ms)
    call = Call(
        key,
        deadline_ms=key.deadline_ms,
        arrived_s=exchange.arrived_s,
        waits_for_end=not intake.stream,
        abort_connection=exchange.abort_connection,
        tolerates_difference=gateway.tolerates_difference,
    )
    for request in requests:
        call.add(request.request_id, request.choice)
    gateway.hold(call)
    try:
        await _send_all(gateway, requests, _trace_headers(exchange))
    except BaseException:
        give_up(gateway, call)  # some requests may be on the log
        raise
    return call


def give_up(gateway: Gateway, call: Call) -> None:
    """Remove a call that has no reader any more, and cancel its requests."""
    gateway.release(call)
    gateway.cancel_later(call, CancelReason.CLIENT_GONE)


def _stream_key(
    gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry, choices: int
) -> StreamKey:
    intake = inquiry.intake
    partition, offset = gateway.backend.reply_position()
    return StreamKey(
        parent_id=exchange.call_id,
        session_id=inquiry.conversation.session_id,
        model=gateway.served.name,
        endpoint=intake.endpoint,
        partition=partition,
        offset=offset,
        created_s=exchange.arrived_ms // 1000,
        deadline_ms=inquiry.options.deadline_ms,
        tenant=exchange.tenant,
        choices=choices,
        prompts=len(intake.prompts),
        include_usage=intake.include_usage,
        token_ids=intake.token_ids,
    )


def requests_of(
    gateway: Gateway, inquiry: Inquiry, key: StreamKey, arrived_ms: int
) -> list[Request]:
    """Build the records for routers, one per choice.

    Raises InvalidRequest for a placement that this deployment does not support.
    """
    intake, options = inquiry.intake, inquiry.options
    check_wishes(gateway.backend.servers, intake, options)
    first = Request(
        request_id=key.parent_id,
        parent_id=key.parent_id,
        session_id=key.session_id,
        turn=inquiry.conversation.turn,
        endpoint=key.endpoint,
        priority=options.priority,
        tenant=key.tenant,
        model=key.model,
        prompt_tokens=pack_tokens(intake.prompts[0]),
        sampling=intake.samplings[0],
        arrived_ms=arrived_ms,
        deadline_ms=key.deadline_ms,
        gateway_id=gateway.gateway_id,
        gateway_partition=key.partition,
        w_ttft=options.w_ttft,
        w_tpot=options.w_tpot,
        policy=options.policy,
        orchestration=options.orchestration,
        gateway_started_ms=gateway.started_ms,
        keeps_running=options.keeps_running,
        retrieval=_retrieval(gateway, intake, arrived_ms),
        cache_scope=_cache_scope(gateway, key.tenant, intake.body.cache_salt),
    )
    if key.choices == 1:
        return [first]
    requests = []
    for choice, request_id in enumerate(choice_ids(key.parent_id, key.choices)):
        prompt, nth = divmod(choice, intake.n)
        sampling = intake.samplings[prompt]
        requests.append(
            replace(
                first,
                request_id=request_id,
                choice=choice,
                prompt_tokens=pack_tokens(intake.prompts[prompt]),
                sampling=replace(sampling, seed=(sampling.seed or 0) + nth),
            )
        )
    return requests


def _cache_scope(gateway: Gateway, tenant: str, salt: str | None) -> str:
    """Return the scope in which prompts may share KV blocks. Names of tenants have no slash."""
    tenant = "" if gateway.settings.shared_cache else tenant
    return f"{tenant}/{salt}" if salt else tenant


def _retrieval(gateway: Gateway, intake: CallIntake, arrived_ms: int) -> Retrieval | None:
    """Return the search that precedes the answer, or None."""
    if intake.search is None:
        return None
    limit, sampling = gateway.served.max_model_len, intake.samplings[0]
    return intake.search.record(gateway.settings, sampling, limit, arrived_ms)


def _trace_headers(exchange: HttpExchange) -> Headers:
    return trace_of([(trace.HEADER, exchange.headers.get(trace.HEADER.encode()))])


async def _send_all(gateway: Gateway, requests: list[Request], headers: Headers) -> None:
    if len(requests) == 1:
        await gateway.backend.send(requests[0], headers)
        return
    await asyncio.gather(*(gateway.backend.send(request, headers) for request in requests))


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
    watcher = exchange.on_hang_up(call.hang_up)
    outcome, is_cut_off = "", False
    try:
        outcome = await write()
    except asyncio.CancelledError:
        is_cut_off = gateway.draining and not call.waits_for_end
        raise
    finally:
        watcher.cancel()
        if outcome == CLIENT_GONE and (keeps_running or gateway.is_resumed(call)):
            gateway.detach(call)
        else:
            gateway.release(call)
            if outcome != COMPLETED and not is_cut_off:
                gateway.cancel_later(call, CancelReason.CLIENT_GONE)
    return outcome


async def _write_stream(
    gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry, call: Call
) -> str:
    intake = inquiry.intake
    writer = ChunkWriter(
        call.key,
        call.streams,
        name=gateway.event_ids.name(call.key) if inquiry.options.event_ids else b"",
        prompts=intake.reported_prompts,
        counts_always=intake.counts_always,
    )
    if (inquiry.conversation.digest or inquiry.cache_lookup) and call.key.choices == 1:
        writer.collected = []
    outcome = await write_stream(exchange, call, writer)
    if outcome == COMPLETED and writer.collected is not None:
        _remember(gateway, inquiry, call, "".join(writer.collected))
    return outcome


async def _write_whole(
    gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry, call: Call
) -> str:
    prompts = inquiry.intake.reported_prompts
    outcome = await write_whole(
        exchange, call, lambda: whole_answer(call.key, call.streams, prompts)
    )
    if outcome == COMPLETED and call.key.choices == 1:
        _remember(gateway, inquiry, call, call.streams[0].drain())
    return outcome


def _remember(gateway: Gateway, inquiry: Inquiry, call: Call, text: str) -> None:
    """Remember an answer for the conversation's next turn, and store it in the response cache."""
    gateway.remember(inquiry.conversation, text)
    if inquiry.cache_lookup is not None:
        inquiry.cache_lookup.store(gateway, call.streams[0], text)
