"""Writes an answer to the client: as server-sent events while it is generated, or whole at its end.

There is one write per call and batch of frames. A stream's response begins with its first token, so
that an error before it has its own HTTP status.
"""

from collections.abc import Callable
from typing import Protocol

from schemas.errors import TriviumError
from streams.calls.stream.answers import call_error, placement_headers
from streams.calls.stream.chunks import one_line_each
from streams.calls.stream.hub import Call
from streams.gateway.http.entry import HeaderList, HttpExchange

COMPLETED, CLIENT_GONE = "completed", "client_gone"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to buffer events
)


class EventWriter(Protocol):
    """Converts the streams of one answer into events."""

    keepalive: bytes  # written after a long silence; may be empty

    def opening(self) -> bytes:
        """Return the events to write once the call is accepted; if empty, the first token is
        awaited."""

    def drain(self) -> bytes:
        """Return all new events, ends included; empty if there are none."""

    def closing(self) -> bytes:
        """Return the events that follow the last end."""

    def failing(self, error: TriviumError) -> bytes:
        """Return the event of an error that breaks the stream; it is the last one."""


def reply_headers(call: Call) -> HeaderList:
    """Return the headers with the ids of the answer, and its placement as far as known."""
    parent_id = call.key.parent_id.encode()
    headers = [
        (b"x-request-id", parent_id),
        (b"x-session-id", call.key.session_id.encode()),
        (b"x-trivium-request-id", parent_id),
    ]
    if call.key.is_message:
        headers.append((b"request-id", parent_id))  # where Anthropic's clients look for it
    for stream in call.streams:
        if stream.start is not None or stream.end is not None:
            return headers + placement_headers(stream.start, stream.end)
    return headers


async def write_stream(exchange: HttpExchange, call: Call, writer: EventWriter) -> str:
    """Write events until the answer is complete; return the outcome.

    Raises the error that ended the call if nothing was written yet.
    """
    started = False

    async def send(chunk: bytes, *, last: bool = False) -> None:
        nonlocal started
        if not started:
            started = True
            headers = [*STREAM_HEADERS, *reply_headers(call)]
            await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        body = one_line_each(chunk)
        await exchange.send({"type": "http.response.body", "body": body, "more_body": not last})

    if opening := writer.opening():
        await send(opening)
    while True:
        await call.next_change()
        if call.client_gone:
            return CLIENT_GONE
        error = call_error(call)
        if error is not None and not started:
            raise error
        last = error is not None or not call.open_streams
        chunk = writer.drain()
        if error is not None:
            chunk += writer.failing(error)
        elif last:
            chunk += writer.closing()
        elif not chunk:
            chunk = writer.keepalive if call.keepalive_due else b""
        call.keepalive_due = False
        if chunk or last:
            await send(chunk, last=last)
        if last:
            return COMPLETED if error is None else error.code


async def write_whole(exchange: HttpExchange, call: Call, body: Callable[[], bytes]) -> str:
    """Write the answer when it is complete; return the outcome, raise the error that ended the
    call."""
    while call.open_streams and not call.client_gone and (error := call_error(call)) is None:
        await call.next_change()
    if call.client_gone:
        return CLIENT_GONE
    if (error := call_error(call)) is not None:
        raise error
    await exchange.send_whole(body(), reply_headers(call))
    return COMPLETED
