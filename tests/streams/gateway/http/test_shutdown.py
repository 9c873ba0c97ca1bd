"""A gateway that stops, and clients that have kept their connections to it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from streams.gateway import app
from streams.gateway.app import create_app
from streams.gateway.http.listener import listen
from streams.gateway.http.server import make_server
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.raw_connection import WHOLE
from tests.streams.gateway.samples import frame
from tests.streams.gateway.streamed_call import accepted_requests
from tests.waits import until

LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


class NoLog:
    """All that is asked of it by a gateway's life."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """It tells nobody."""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def stopping(
    gateway: InProcessGateway, payload: bytes = b""
) -> AsyncIterator[tuple[Connection, asyncio.Task[None]]]:
    """A connection that had an answer, to a gateway that was told to stop since; and its life.
    What was asked on it has one token when that happens.
    """
    sock, stop = listen("127.0.0.1", 0), asyncio.Event()
    log: Any = NoLog()
    works = (log.run(),)
    life = asyncio.create_task(
        app._serve(
            *(gateway.state, log, works, sock, stop), is_ready=lambda: True, is_inherited=False
        )
    )
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    try:
        writer.write(LIVE)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(b'{"status":"ok"}'))
        if payload:
            writer.write(payload)
            (request,) = await accepted_requests(gateway)
            await gateway.log.push(frame(request.request_id, ["a"]))
        stop.set()
        await until(lambda: gateway.state.calls.draining)
        yield (reader, writer), life
    finally:
        writer.transport.abort()
        await life


async def test_stopping_gateway_answers_open_connection_once_more() -> None:
    """A connection that closes at the moment of a request would leave it without answer."""
    async with stopping(InProcessGateway(linger_ms=600_000)) as ((reader, writer), life):
        writer.write(WHOLE)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # up to its end
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close" in head
        assert b"shutting down" in body
        await life  # nobody else has a connection


async def test_idle_connections_do_not_delay_shutdown() -> None:
    async with stopping(InProcessGateway(linger_ms=1)) as ((reader, _), life):
        await life
        assert await reader.read() == b""


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_stopping_server_serves_connection_in_backlog(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A reset would leave its client in doubt whether the call was read."""

    async def run() -> None:
        gateway, sock = InProcessGateway(), listen("127.0.0.1", 0)
        server = make_server(create_app(gateway.state), gateway.state.settings)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        address = sock.getsockname()
        client = socket.create_connection(address)  # the loop has no turn before it stops
        await server.stop_listening(sock)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(LIVE)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        server.should_exit = True
        await serving
        sock.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())


async def test_stopping_gateway_refuses_new_connections() -> None:
    """A call on a connection that is made too late would be reset."""
    async with stopping(InProcessGateway(linger_ms=600_000)) as ((_, writer), life):
        address = writer.get_extra_info("peername")

        async def refused() -> bool:
            try:
                _, late_writer = await asyncio.open_connection(*address)
            except ConnectionRefusedError:
                return True
            late_writer.transport.abort()
            return False

        await until(refused)
        assert not life.done()


async def test_stream_cut_by_shutdown_is_not_cancelled() -> None:
    """Its client can resume at another gateway."""
    gateway = InProcessGateway(grace_ms=1, linger_ms=1)
    async with stopping(gateway, WHOLE) as ((reader, _), life):
        head = await reader.readuntil(b"id: ")  # the stream has begun, and can be resumed
        assert b" 200 " in head
        await life
    await asyncio.gather(*gateway.state.calls._background)
    assert len(gateway.log.requests) == 1
    assert not gateway.log.cancellations
