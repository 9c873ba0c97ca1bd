"""A gateway that stops, and clients that have kept their connections to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from streams.gateway import app
from streams.gateway.http.server import listen
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.raw_connection import WHOLE
from tests.waiting import until

LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


class NoLog:
    """All that is asked of it by a gateway's life."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """It tells nobody."""


Kept = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def stopping(gateway: InProcessGateway) -> AsyncIterator[tuple[Kept, asyncio.Task[None]]]:
    """A connection that had an answer, to a gateway that was told to stop since; and its life."""
    sock, stop = listen("127.0.0.1", 0), asyncio.Event()
    sock.listen()  # connections wait until it serves
    log: Any = NoLog()
    for_all: Any = ()
    life = asyncio.create_task(app._serve(gateway.state, log, for_all, sock, stop))
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    try:
        writer.write(LIVE)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(b'{"status":"ok"}'))
        stop.set()
        await until(lambda: gateway.state.draining)
        yield (reader, writer), life
    finally:
        writer.transport.abort()
        await life


async def test_a_kept_connection_is_answered_once_more_while_its_gateway_stops() -> None:
    """It was closed at the moment of a request, which had no answer at all (issue 14, 5)."""
    async with stopping(InProcessGateway(linger_ms=600_000)) as ((reader, writer), life):
        writer.write(WHOLE)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # up to its end
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close" in head
        assert b"shutting down" in body
        await life  # nobody else has a connection


async def test_connections_that_nobody_uses_do_not_hold_a_gateway_up() -> None:
    """(issue 14, 5)"""
    async with stopping(InProcessGateway(linger_ms=1)) as ((reader, _), life):
        await life
        assert await reader.read() == b""
