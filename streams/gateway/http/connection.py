"""One connection, as real clients speak HTTP/1: what uvicorn's protocol lacks of that.

Theory of operation. An offer of another protocol (`Upgrade: h2c` of every Java `HttpClient`) is not
taken, and httptools would skip the body behind it: so a parser of its own reads that head again,
without the offer. What cannot be read is refused as JSON, behind the answers that are under way.

A client that closes its sending side still gets its answers. One that closed the whole connection
looks the same until something is sent to it. So a byte of the answer leaves at once, the first of
the status line or a leading zero of the next chunk's size: who has gone answers that with a reset,
which ends its work. The other way round, a connection that ends
while its client may be sending is closed for writing alone at first: a reset would take the answer
away from a client that has not read it.

How long and how large a request may be is decided in `slow_clients.py` and `head_limits.py`.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import InvalidRequest, TooManyRequests, TriviumError
from streams.gateway.config import GatewaySettings
from streams.gateway.http.errors import error_body, retry_headers
from streams.gateway.http.library import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

_OFFER = (b"upgrade", b"http2-settings")
_PIPELINED_MAX = 128
_ANY_STATUS, _ANY_SIZE = STATUS_LINE[200][:1], b"0"  # what an answer, and a chunk, may begin with


class HttpConnection(HttpToolsProtocol):
    """One connection with its requests, of which one is answered at a time."""

    def __init__(self, *args: Any, limits: GatewaySettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._is_offer = False  # the head that was read offers another protocol
        self._in_head = True  # else in a body, or in the trailers behind it
        self._running: RequestResponseCycle | None = None  # the call that was begun last
        self._is_refused = False  # nothing more is read
        self._last_answer = b""  # follows those that are under way
        self._is_half_closed = False  # by the client
        self._is_ended = False  # by us; what still comes is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Take the transport of a new connection."""
        super().connection_made(transport)
        self._answers = _Answers(transport, self._end)

    def data_received(self, data: bytes) -> None:
        """Requests, or parts of one; refused where they cannot be read."""
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
        """The head without its offer; the body follows."""
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
        """A header. Trailers are dropped: no proxy looks at them, and nobody here needs one."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the call, or let it wait behind another."""
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
        """Part of a body; nobody waits for that of a call that was refused."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole, and the next head begins."""
        self._in_head = True
        if not (self._is_offer or self._is_refused):
            super().on_message_complete()
            self.cycle.more_body = False  # of an answer that did not wait for it, too

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
        """The next request may come, or was there already."""
        if self._is_ended:
            return
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        elif self._last_answer and self.is_free:
            self._end_with(self._last_answer)

    @property
    def is_free(self) -> bool:
        """No answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_ending(self) -> bool:
        """Whether no more requests are answered here."""
        return self._is_ended or self.transport.is_closing()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """The client sends no more; returns whether there is anything to answer yet."""
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
        """Send what a client that has gone answers with a reset, and another one does not see."""
        running.waiting_for_100_continue = False
        if not running.response_started:
            self._answers.begin(_ANY_STATUS)
        elif running.chunked_encoding:
            self.transport.write(_ANY_SIZE)

    def is_reset(self) -> bool:
        """Whether a client that sends no more has gone altogether."""
        if not self._is_half_closed:
            return False
        poll = select.poll()  # the loop looks no more at what a client sends
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))

    def refuse(self, error: TriviumError) -> None:
        """Answer what cannot be read, behind the answers that are under way, and close."""
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
        """Forget a request that will not be whole; false where it is being answered already."""
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
            *retry_headers(error.http_status, self._limits.retry_after_s),
        ]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        return STATUS_LINE[error.http_status] + head + b"\r\n" + body

    def _end_with(self, answer: bytes) -> None:
        if not self.is_ending:
            self.transport.write(answer)
            self._end()

    def _end(self) -> None:
        """Close, or let the client read first what was answered while it sends."""
        is_whole = self.cycle is None or not self.cycle.more_body
        if self._is_half_closed or is_whole and not self._is_refused:
            self.transport.close()
        elif not self.is_ending:
            self._is_ended = True
            self.transport.write_eof()
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all calls, not the newest alone."""
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
    """For HTTP/1.0, which knows no chunks: what has no length ends with its connection."""

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
    """For clients that wait to be told to send their body: one that was not told may send it or
    not, so what would follow on the connection cannot be read.
    """

    async def run(scope: Scope, receive: Receive, _: Send) -> None:
        async def send(message: Message) -> None:
            if cycle.waiting_for_100_continue and cycle.more_body:
                cycle.keep_alive = False
            await cycle.send(message)  # type: ignore[arg-type]  # the same messages

        await app(scope, receive, send)

    return run


class _Answers:
    """What calls see of their connection's transport."""

    __slots__ = ("_write", "close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = self._write = transport.write
        self.is_closing = transport.is_closing
        self.close = close

    def begin(self, prefix: bytes) -> None:
        """Write the first bytes of the next answer, which are the same in all."""

        def write_rest(data: bytes | bytearray | memoryview) -> None:
            self.write = self._write
            self._write(data[len(prefix) :])

        self._write(prefix)
        self.write = write_rest
