"""A connection to a gateway whose bytes the test writes itself, and calls as such bytes."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from tests.streams.gateway.samples import chat

CHATS = "/v1/chat/completions"
BODY = json.dumps(chat(stream=True)).encode()
HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHATS.encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a server."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def raw_connection(
    url: str, payload: bytes = b"", *, ends: bool = False
) -> AsyncIterator[asyncio.StreamReader]:
    """A connection of its own, on which these bytes were sent, and perhaps the end of all that is
    sent (`nc -N`); gives what comes back.
    """
    sock = socket.create_connection(address_of(url))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    reader, writer = await asyncio.open_connection(sock=sock, limit=4_096)
    try:
        writer.write(payload)
        await writer.drain()
        if ends:
            writer.write_eof()
        yield reader
    finally:
        writer.transport.abort()


class ReadBytes(socket.socket):
    """What came from a server, as the socket from which `http.client` reads answers."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.close()
        self._data = io.BytesIO(data)
        self._data.close = lambda: None  # type: ignore[method-assign]  # several answers are in it

    def makefile(self, *_: Any, **__: Any) -> Any:
        """All that came, as far as it was not read."""
        return self._data
