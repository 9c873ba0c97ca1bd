"""One connection, as real clients speak HTTP/1: adds what uvicorn's protocol lacks.

Theory of operation. The gateway does not accept an offer of another protocol (`Upgrade: h2c` of
every Java `HttpClient`), and httptools would skip the body after it. So a second parser reads that
head again, without the offer. A request that cannot be read is refused with a JSON error, after the
answers in progress.

A client that closes its sending side still gets its answers. A client that has closed the whole
connection looks the same until something is sent to it. So one byte of the answer is sent at once:
the first of the status line, or a leading zero of the next chunk's size. If the client has gone, it
replies with a reset, which ends its call. In the other direction, a connection that ends while its
client may be sending is at first closed for writing only: a reset would discard the answer before
the client has read it.

`slow_clients.py` and `head_limits.py` limit the time and the size of a request.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import InvalidRequest, TooManyRequests, TriviumError
from streams.calls.config import GatewaySettings
from streams.calls.errors import error_body, retry_headers
from streams.gateway.http.library import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

_OFFER = (b"upgrade", b"http2-settings")
_PIPELINED_MAX = 128
_ANY_STATUS, _ANY_SIZE = STATUS_LINE[200][:1], b"0"  # first byte of any answer, and of any chunk


class HttpConnection(HttpToolsProtocol):
    """A connection with its requests, of which one is answered at a time."""

    def __init__(self, *args: Any, limits: GatewaySettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._is_offer = False  # the last head offers another protocol
        self._in_head = True  # False: in a body, or in its trailers
        self._running: RequestResponseCycle | None = None  # the last call that was started
        self._is_refused = False  # no more input is read
        self._last_answer = b""  # sent after the answers in progress
        self._is_half_closed = False  # by the client
        self._is_ended = False  # by the gateway; later input is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Take the transport of a new connection."""
        super().connection_made(transport)
        self._answers = _Answers(transport, self._end)

    def data_received(self, data: bytes) -> None:
        """Parse requests, or parts of one, and refuse them if they cannot be read."""
        if self._is_refused or self._is_ended:
            return
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while not self._is_refused:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offer:
                    rest = rest[offer.args[0] :]
                    self._read_again()
        except httptools.HttpParserError as error:
            self.refuse(InvalidRequest(f"expected a request of HTTP/1.1, found none: {error}"))

    def _read_again(self) -> None:
        """Parse the head again without its offer; the body follows."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.refuse(InvalidRequest("CONNECT: expected a call, this is no proxy"))
            return
        head = b"%b %b HTTP/%b\r\n" % (method, self.url, version)
        headers = [header for header in self.headers if header[0] not in _OFFER]
        self._is_offer, self._in_head = False, True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(
            head + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped: proxies do not check them, and no endpoint needs
        them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the call, or queue it after the call in progress."""
        self._in_head = False
        self._is_offer = self.parser.should_upgrade()
        if self._is_offer or self._is_refused:
            return
        super().on_headers_complete()
        if len(self.pipeline) > _PIPELINED_MAX:
            self.refuse(
                TooManyRequests(f"at most {_PIPELINED_MAX} requests may wait on one connection")
            )

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, unless its call was refused."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the request as complete; the next head begins."""
        self._in_head = True
        if not (self._is_offer or self._is_refused):
            super().on_message_complete()
            self.cycle.more_body = False  # also for an answer that did not wait for the body

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = self._answers  # type: ignore[assignment]  # as far as it is used
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
            app = _without_chunks(app, cycle)
        elif cycle.waiting_for_100_continue:
            app = _closing_unread(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next request, or send the last answer and close."""
        if self._is_ended:
            return
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        elif self._last_answer and self.is_free:
            self._end_with(self._last_answer)

    @property
    def is_free(self) -> bool:
        """Return whether no answer is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_ending(self) -> bool:
        """Return whether this connection answers no more requests."""
        return self._is_ended or self.transport.is_closing()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """Handle the end of the client's input; return whether there is still an answer to send."""
        newest = self.cycle
        if self._is_ended or self._running is None:
            return False
        if newest.more_body and not self._drop_queued(newest):
            return False
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last.response_complete:
            return bool(self._last_answer)
        if not self._last_answer:
            last.keep_alive = False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._probe(self._running)
        return True

    def _probe(self, running: RequestResponseCycle) -> None:
        """Send a byte to which a closed client replies with a reset, and which others ignore."""
        running.waiting_for_100_continue = False
        if not running.response_started:
            self._answers.begin(_ANY_STATUS)
        elif running.chunked_encoding:
            self.transport.write(_ANY_SIZE)

    def is_reset(self) -> bool:
        """Return whether a client that closed its sending side has closed the whole connection."""
        if not self._is_half_closed:
            return False
        poll = select.poll()  # the loop no longer reads this socket
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))

    def refuse(self, error: TriviumError) -> None:
        """Answer a request that cannot be read, after the answers in progress, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        newest = self.cycle
        if newest is not None and newest.more_body and not self._drop_queued(newest):
            _disconnect(newest)
            if newest.response_started:
                self._end()
            else:
                self._end_with(self._refusal(error))
        elif self.is_free and not self.pipeline:
            self._end_with(self._refusal(error))
        else:
            self._last_answer = self._refusal(error)

    def _drop_queued(self, newest: RequestResponseCycle) -> bool:
        """Drop a request that will never be complete; return False if its answer has begun."""
        if newest is self._running:
            return False
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]  # there is one
        return True

    def _refusal(self, error: TriviumError) -> bytes:
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *retry_headers(error.http_status),
        ]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        return STATUS_LINE[error.http_status] + head + b"\r\n" + body

    def _end_with(self, answer: bytes) -> None:
        if not self.is_ending:
            self.transport.write(answer)
            self._end()

    def _end(self) -> None:
        """Close, or close for writing only, so that a client that is sending can read its answer
        first."""
        is_whole = self.cycle is None or not self.cycle.more_body
        if self._is_half_closed or is_whole and not self._is_refused:
            self.transport.close()
        elif not self.is_ending:
            self._is_ended = True
            self.transport.write_eof()
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all calls of the connection, not only the newest."""
        calls = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        super().connection_lost(exc)
        for cycle in (self._running, *calls):
            if cycle is not None and not cycle.response_complete:
                _disconnect(cycle)


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap an app for HTTP/1.0, which has no chunks: an answer without a length ends with its
    connection."""

    async def run(scope: Scope, receive: Receive, _: Send) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                cycle.expected_content_length = len(message.get("body", b""))
            await cycle.send(message)  # type: ignore[arg-type]  # the same messages

        await app(scope, receive, send)

    return run


def _closing_unread(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap an app for clients that wait for `100 Continue` before they send a body.

    If the answer comes without it, the client may send the body or not. So the next request on the
    connection could not be found, and the connection is closed.
    """

    async def run(scope: Scope, receive: Receive, _: Send) -> None:
        async def send(message: Message) -> None:
            if cycle.waiting_for_100_continue and cycle.more_body:
                cycle.keep_alive = False
            await cycle.send(message)  # type: ignore[arg-type]  # the same messages

        await app(scope, receive, send)

    return run


class _Answers:
    """A connection's transport, with the methods that calls use."""

    __slots__ = ("_write", "close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = self._write = transport.write
        self.is_closing = transport.is_closing
        self.close = close

    def begin(self, prefix: bytes) -> None:
        """Write the first bytes of the next answer, which are the same for all answers."""

        def write_rest(data: bytes | bytearray | memoryview) -> None:
            self.write = self._write
            self._write(data[len(prefix) :])

        self._write(prefix)
        self.write = write_rest
