"""The endpoints on the path: POST for chats and completions, and resuming a stream.

Plain ASGI callables: no request object, no middleware, one task beside the handler that notices a
hang-up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive, Scope, Send

from schemas.errors import NotFound, TriviumError
from schemas.log.clock import wall_ms
from schemas.records import CancelReason, Endpoint
from streams.gateway.endpoints.accept import Caller, accept, conversation_of, keeps_running
from streams.gateway.http.exchange import (
    HeaderList,
    RawHeaders,
    cut_of,
    headers_of,
    send_error,
    start_watch,
)
from streams.gateway.ids import choice_ids, from_public, is_id, new_request_id
from streams.gateway.request.conversation import Conversation
from streams.gateway.request.intake import take_in
from streams.gateway.state import Gateway
from streams.gateway.stream.chunks import ChunkWriter
from streams.gateway.stream.delivery import COMPLETED, GONE, write_stream, write_whole
from streams.gateway.stream.event_id import Position, StreamKey
from streams.gateway.stream.hub import Call, Hub

logger = logging.getLogger(__name__)
BUG = "an error of the gateway; its log has the details"
RESUME_HEADER = b"last-event-id"

Handler = Callable[[Gateway, Scope, RawHeaders, Receive, Send, HeaderList], Awaitable[str]]


class AsgiEndpoint:
    """An ASGI app around a handler: errors become OpenAI bodies, outcomes are counted.

    The handler returns the outcome and fills the list with the headers that an error carries too.
    """

    def __init__(self, gateway: Gateway, name: str, handler: Handler) -> None:
        self._gateway = gateway
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        names: HeaderList = []
        try:
            outcome = await self._handler(gateway, scope, headers_of(scope), receive, send, names)
        except TriviumError as error:
            outcome = error.code
            await send_error(send, error, names, gateway.settings.retry_after_s)
        except Exception:
            outcome = TriviumError.code
            logger.exception("%s: a bug", self._name)
            # Refused where the response has begun; then the server closes the connection.
            await send_error(send, TriviumError(BUG), names, 0)
        gateway.metrics.done(self._name, outcome)


def generate(endpoint: Endpoint) -> Handler:
    """POST /v1/chat/completions and /v1/completions."""

    async def handle(
        gateway: Gateway,
        scope: Scope,
        headers: RawHeaders,
        receive: Receive,
        send: Send,
        names: HeaderList,
    ) -> str:
        arrived_s, arrived_ms = asyncio.get_running_loop().time(), wall_ms()
        parent_id = new_request_id(arrived_ms)
        names.append((b"x-request-id", parent_id.encode()))
        tenant = gateway.keys.tenant(headers)
        if RESUME_HEADER in headers:
            at = _last_event(gateway, headers, tenant)
            await gateway.bodies.read(headers, receive)
            return await _resume(gateway, *at, scope, receive, send, names)
        gateway.admit()  # before anything of the body is kept
        raw = await gateway.bodies.read(headers, receive)
        caller = Caller(
            parent_id=parent_id,
            tenant=tenant,
            headers=headers,
            arrived_ms=arrived_ms,
            arrived_s=arrived_s,
            cut=cut_of(scope),
        )
        return await _answer(gateway, endpoint, caller, raw, receive, send, names)

    return handle


async def _answer(
    gateway: Gateway,
    endpoint: Endpoint,
    caller: Caller,
    raw: bytes,
    receive: Receive,
    send: Send,
    names: HeaderList,
) -> str:
    intake = await take_in(raw, endpoint, gateway.served, gateway.settings)
    conversation = conversation_of(gateway, caller, intake)
    names.append((b"x-session-id", conversation.session_id.encode()))
    keep = keeps_running(caller.headers)
    call = await accept(gateway, caller, intake, conversation)
    names.append((b"x-trivium-request-id", caller.parent_id.encode()))  # now it is on the log
    watcher = start_watch(receive, call)
    outcome = ""
    try:
        if intake.stream:
            outcome = await _stream(gateway, call, conversation, send)
        else:
            outcome = await _whole(gateway, call, conversation, send)
    finally:
        watcher.cancel()
        if outcome == GONE and keep:
            gateway.detach(call)
        else:
            gateway.release(call)
            if outcome != COMPLETED:
                gateway.cancel_later(call, CancelReason.CLIENT_GONE)
    return outcome


async def _stream(gateway: Gateway, call: Call, conversation: Conversation, send: Send) -> str:
    writer = ChunkWriter(call.key, gateway.event_ids.name(call.key), call.streams)
    if conversation.digest and call.key.choices == 1:
        writer.said = []
    outcome = await write_stream(call, writer, send)
    if outcome == COMPLETED and writer.said is not None:
        gateway.remember(conversation, "".join(writer.said))
    return outcome


async def _whole(gateway: Gateway, call: Call, conversation: Conversation, send: Send) -> str:
    outcome = await write_whole(call, send)
    if outcome == COMPLETED and call.key.choices == 1:
        gateway.remember(conversation, call.streams[0].drain())
    return outcome


def _last_event(
    gateway: Gateway, headers: RawHeaders, tenant: str
) -> tuple[StreamKey, list[Position]]:
    return gateway.event_ids.parse(headers[RESUME_HEADER].decode("latin-1"), tenant)


async def events(
    gateway: Gateway,
    scope: Scope,
    headers: RawHeaders,
    receive: Receive,
    send: Send,
    names: HeaderList,
) -> str:
    """GET /v1/requests/{id}/events: the stream after `Last-Event-ID`, or from its beginning."""
    tenant = gateway.keys.tenant(headers)
    parent_id = from_public(scope["path_params"]["request_id"])
    named = parent_id if is_id(parent_id) else new_request_id(wall_ms())
    names.append((b"x-request-id", named.encode()))
    call = gateway.find(parent_id, tenant)
    if RESUME_HEADER in headers:
        key, positions = _last_event(gateway, headers, tenant)
        if key.parent_id != parent_id:
            raise NotFound(f"{parent_id[:64]}: the Last-Event-ID belongs to another request")
    elif call is not None:
        key, positions = call.key, [Position()] * call.key.choices
    else:
        raise NotFound(
            f"{parent_id[:64]}: not being answered by this gateway; to resume it anywhere, send "
            "the id of its last event as Last-Event-ID"
        )
    return await _resume(gateway, key, positions, scope, receive, send, names)


async def _resume(
    gateway: Gateway,
    key: StreamKey,
    positions: Sequence[Position],
    scope: Scope,
    receive: Receive,
    send: Send,
    names: HeaderList,
) -> str:
    """Read the stream's partition from where it began, and write what the client lacks.

    The request itself is left alone: hanging up here does not cancel it. It goes on where the
    gateway that accepted it is lost, for this one reads it.
    """
    names[:] = [
        (b"x-request-id", key.parent_id.encode()),
        (b"x-session-id", key.session_id.encode()),
    ]
    gateway.admit_resume(key.parent_id)
    loop = asyncio.get_running_loop()
    call = Call(
        key,
        deadline_ms=max(key.deadline_ms, wall_ms() + gateway.settings.resume_ms),
        arrived_s=loop.time(),
        only_end=False,
        goes_on=gateway.goes_on,
        cut=cut_of(scope),
    )
    ids = choice_ids(key.parent_id, key.choices)
    for choice, (request_id, at) in enumerate(zip(ids, positions, strict=True)):
        call.add(request_id, choice, at)
    writer = ChunkWriter(key, gateway.event_ids.name(key), call.streams, positions)
    gateway.followers.add(call)
    tasks = [start_watch(receive, call), loop.create_task(_pump(gateway, call))]
    if gateway.find(key.parent_id, key.tenant) is None:
        tasks.append(loop.create_task(gateway.take_up(call)))
    try:
        return await write_stream(call, writer, send)
    finally:
        for task in tasks:
            task.cancel()
        gateway.followers.discard(call)


async def _pump(gateway: Gateway, call: Call) -> None:
    """Frames of the call's partition to the call alone."""
    hub = Hub()
    hub.add(call)
    try:
        async for frame in gateway.backend.follow(call.key.partition, call.key.offset):
            hub.apply(frame, asyncio.get_running_loop().time())
    except TriviumError as error:
        call.fail(error)
