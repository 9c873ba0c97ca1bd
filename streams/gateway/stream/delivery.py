"""Writing an answer: as server-sent events while it comes, or whole when it is there.

One write per call and batch of frames. A stream's response begins with its first token, so that
whatever fails before it has a status of its own.
"""

from collections.abc import Callable
from typing import Protocol

from schemas.errors import TriviumError
from streams.gateway.http.exchange import HeaderList, HttpExchange
from streams.gateway.stream.answers import end_error, placement_headers
from streams.gateway.stream.hub import Call

COMPLETED, CLIENT_GONE = "completed", "client_gone"
# For clients that asked for more than OpenAI sends: readers of benchmarks take a comment for JSON.
# No blank line follows, as that would end an event, and `openai` then makes one without data: in Go
# always, in Python as soon as events have had ids.
KEEPALIVE = b": keep-alive\n"
# JSON may hold these as they are, but Python's `str.splitlines`, by which `httpx` and what is built
# on it find lines, ends a line at each.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to hold events back
)


class EventWriter(Protocol):
    """Puts the streams of one answer into events."""

    keepalive: bytes  # what is written where nothing comes for long; empty: nothing

    def opening(self) -> bytes:
        """What is written as soon as the call is accepted; empty: its first token is waited for."""

    def drain(self) -> bytes:
        """Everything new, and the ends; empty where nothing is."""

    def closing(self) -> bytes:
        """What follows the last end."""

    def failing(self, error: TriviumError) -> bytes:
        """What a client gets when its stream breaks; nothing follows it."""


def one_line_each(events: bytes) -> bytes:
    """Events whose JSON ends no line, whatever a client takes for the end of one."""
    if not events.isascii():
        for end, escape in _LINE_ENDS:
            events = events.replace(end, escape)
    return events


def reply_headers(call: Call) -> HeaderList:
    """Whose answer it is, and where it is computed as far as that is known by now."""
    parent_id = call.key.parent_id.encode()
    headers = [
        (b"x-request-id", parent_id),
        (b"x-session-id", call.key.session_id.encode()),
        (b"x-trivium-request-id", parent_id),
    ]
    for stream in call.streams:
        if stream.start is not None or stream.end is not None:
            return headers + placement_headers(stream.start, stream.end)
    return headers


def call_error(call: Call) -> TriviumError | None:
    if call.failure is None and call.failed_end is not None:
        return end_error(call.failed_end)
    return call.failure


async def write_stream(exchange: HttpExchange, call: Call, writer: EventWriter) -> str:
    """Write events until the answer is whole; returns the outcome.

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
    """Write the answer when it is whole; returns the outcome, raises the error that ended it."""
    while call.open_streams and not call.client_gone and (error := call_error(call)) is None:
        await call.next_change()
    if call.client_gone:
        return CLIENT_GONE
    if (error := call_error(call)) is not None:
        raise error
    await exchange.send_whole(body(), reply_headers(call))
    return COMPLETED
