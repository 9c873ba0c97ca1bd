"""GET /v1/requests/{id}/events, and calls with `Last-Event-ID`: the rest of a stream, from the log.

Any gateway can resume a stream, not only the one that accepted the request.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from schemas.errors import NotFound, TriviumError
from streams.anthropic.events import MessageEvents
from streams.calls.ids import choice_ids, from_public, is_id, new_request_id
from streams.calls.stream.chunks import ChunkWriter
from streams.calls.stream.event_id import ClientPosition, StreamKey
from streams.calls.stream.hub import Call, Hub
from streams.gateway.http.delivery import EventWriter, write_stream
from streams.gateway.http.entry import HttpExchange
from streams.gateway.state import Gateway
from streams.log.clock import wall_ms

RESUME_MS: Final = 15_000  # after the deadline, to deliver what the log has
RESUME_HEADER = b"last-event-id"


def last_event(gateway: Gateway, exchange: HttpExchange) -> tuple[StreamKey, list[ClientPosition]]:
    """Parse the `Last-Event-ID` header; raises InvalidRequest."""
    value = exchange.headers[RESUME_HEADER].decode("latin-1")
    return gateway.event_ids.parse(value, exchange.tenant)


async def events(gateway: Gateway, exchange: HttpExchange) -> str:
    """Write the stream after `Last-Event-ID`, or from its beginning; return the outcome."""
    exchange.tenant = gateway.callers.keys.tenant(exchange.headers)
    parent_id = from_public(exchange.scope["path_params"]["request_id"])
    request_id = parent_id if is_id(parent_id) else new_request_id(wall_ms())
    exchange.reply_headers.append((b"x-request-id", request_id.encode()))
    call = gateway.calls.find_call(parent_id, exchange.tenant)
    echoes: Sequence[str] = ()
    if RESUME_HEADER in exchange.headers:
        key, positions = last_event(gateway, exchange)
        if key.parent_id != parent_id:
            raise NotFound(f"{parent_id[:64]}: the Last-Event-ID belongs to another request")
    elif call is not None:
        key, positions = call.key, [ClientPosition()] * call.key.choices
        echoes = call.echoes
    else:
        raise NotFound(
            f"{parent_id[:64]}: not being answered by this gateway; to resume it anywhere, send "
            "the id of its last event as Last-Event-ID"
        )
    return await resume(gateway, exchange, key, positions, echoes)


async def resume(
    gateway: Gateway,
    exchange: HttpExchange,
    key: StreamKey,
    positions: Sequence[ClientPosition],
    echoes: Sequence[str] = (),
) -> str:
    """Read the stream's partition from its first offset, and write what the client lacks.

    `echoes`: the prompts' texts before the answers, for a client that has no event yet.
    """
    if key.is_message:
        return await _resume_message(gateway, exchange, key, positions[0].next_seq)
    call = resumed_call(gateway, exchange, key, positions)
    name = gateway.event_ids.name(key)
    writer = ChunkWriter(
        key,
        call.streams,
        name=name,
        client_positions=positions,
        names_reasoning_content=gateway.settings.reasoning_content,
        echoes=echoes,
    )
    return await read_on(gateway, exchange, call, writer)


async def _resume_message(
    gateway: Gateway, exchange: HttpExchange, key: StreamKey, after: int
) -> str:
    call = resumed_call(gateway, exchange, key, [ClientPosition()])
    writer = MessageEvents(
        call,
        tokens_max=gateway.models.max_model_len(key.model),
        name=gateway.event_ids.name(key),
        after=after,
    )
    return await read_on(gateway, exchange, call, writer)


def _nothing() -> None:
    pass


async def read_on(
    gateway: Gateway,
    exchange: HttpExchange,
    call: Call,
    writer: EventWriter,
    after_frame: Callable[[], None] = _nothing,
) -> str:
    """Write the rest of a call that any gateway may have accepted; return the outcome.

    A disconnect here does not cancel the request. If the gateway that accepted it is lost, the
    request continues, because routers know this gateway as a reader (`announce_reader`).
    """
    key = call.key
    exchange.reply_headers = [
        (b"x-request-id", key.parent_id.encode()),
        (b"x-session-id", key.session_id.encode()),
    ]
    gateway.calls.admit_resume(key.parent_id, key.tenant)
    gateway.calls.resumed.add(call)
    loop = asyncio.get_running_loop()
    reading = loop.create_task(_read_frames(gateway, call, after_frame))
    tasks = [exchange.on_hang_up(call.hang_up), reading]
    if gateway.calls.find_call(key.parent_id, key.tenant) is None:
        tasks.append(loop.create_task(gateway.calls.announce_reader(call)))
    try:
        return await write_stream(exchange, call, writer)
    finally:
        for task in tasks:
            task.cancel()
        gateway.calls.resumed.discard(call)


def resumed_call(
    gateway: Gateway,
    exchange: HttpExchange | None,
    key: StreamKey,
    positions: Sequence[ClientPosition],
    *,
    waits_for_end: bool = False,
) -> Call:
    """Build a call to read here from these positions on, whichever gateway accepted it.

    Without an `exchange`, the gateway reads it for itself.
    """
    call = Call(
        key,
        deadline_ms=max(key.deadline_ms, wall_ms() + RESUME_MS),
        arrived_s=exchange.arrived_s if exchange else asyncio.get_running_loop().time(),
        waits_for_end=waits_for_end,
        tolerates_difference=gateway.calls.tolerates_difference,
        abort_connection=exchange.abort_connection if exchange else _nothing,
    )
    ids = choice_ids(key.parent_id, key.choices)
    for choice, (request_id, position) in enumerate(zip(ids, positions, strict=True)):
        call.add(request_id, choice, position)
    return call


async def _read_frames(gateway: Gateway, call: Call, after_frame: Callable[[], None]) -> None:
    """Apply the frames of the call's partition to this call only."""
    hub = Hub(on_void=gateway.calls.hub.on_void)
    hub.add(call)
    try:
        async for frame in gateway.tokens.read_again(call.key.partition, call.key.offset):
            hub.apply(frame, asyncio.get_running_loop().time())
            after_frame()
    except TriviumError as error:
        call.fail(error)
