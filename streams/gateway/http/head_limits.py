"""Limits the size of a request outside of its body; uvicorn has no such limit.

Bytes are counted as they arrive, so an endless head is refused before it is complete, and so are
trailers and the lines around the chunks of a body. `slow_clients.py` limits the time, and
`entry.py` the size of a body.
"""

import functools
from collections.abc import Callable
from typing import Any

from schemas.errors import HeadersTooLarge
from streams.calls.config import GatewaySettings
from streams.gateway.http.slow_clients import PatientProtocol


class BoundedProtocol(PatientProtocol):
    """A connection. It answers a head above the limits with status 431, and closes."""

    def __init__(self, *args: Any, limits: GatewaySettings, **kwargs: Any) -> None:
        super().__init__(*args, limits=limits, **kwargs)
        self._parts = 0  # number of heads, parts of bodies and ends so far
        self._bytes_between = 0  # bytes since the last of them

    def data_received(self, data: bytes) -> None:
        """Count bytes that only extend a head, trailers or a chunk's line."""
        before = self._parts
        super().data_received(data)
        self._bytes_between = self._bytes_between + len(data) if self._parts == before else 0
        if self._bytes_between > self._limits.header_bytes_max:
            self._refuse_head(f"more than {self._limits.header_bytes_max} bytes")

    def on_headers_complete(self) -> None:
        """Start the call, unless its head is too large."""
        self._parts += 1
        limits, size = self._limits, len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        if size > limits.header_bytes_max:
            self._refuse_head(f"{size} bytes")
        elif len(self.headers) > limits.headers_max:
            self._refuse_head(f"{len(self.headers)} of them")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a part of a body."""
        self._parts += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Count the end of a request; the next head begins."""
        self._parts += 1
        super().on_message_complete()

    def _refuse_head(self, size_text: str) -> None:
        limits = self._limits
        self.refuse(
            HeadersTooLarge(
                f"headers: expected at most {limits.headers_max} with at most "
                f"{limits.header_bytes_max} bytes together, found {size_text}"
            )
        )


def connection_factory(limits: GatewaySettings) -> Callable[..., BoundedProtocol]:
    """Return the factory of a connection's protocol, for `uvicorn.Config(http=...)`."""
    return functools.partial(BoundedProtocol, limits=limits)
