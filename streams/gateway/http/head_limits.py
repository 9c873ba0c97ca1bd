"""How much of a request's head the server takes: uvicorn has no bound on it of its own.

A head is counted as it arrives, so that one without end is refused before it is whole. How long it
may take is `slow_clients.py`'s, how large a body may be `exchange.py`'s.
"""

import functools
from collections.abc import Callable
from typing import Any

from schemas.errors import HeadersTooLarge
from streams.gateway.config import GatewaySettings
from streams.gateway.http.slow_clients import PatientProtocol


class BoundedProtocol(PatientProtocol):
    """One connection. A head above the limits is answered with 431, and the connection closed."""

    def __init__(self, *args: Any, limits: GatewaySettings, **more: Any) -> None:
        super().__init__(*args, limits=limits, **more)
        self._heads = 0  # how many were complete
        self._head_bytes = 0  # of the one that is not
        self._in_head = True

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that goes on after these bytes."""
        heads, was_in_head = self._heads, self._in_head  # else the end of a body was a head's
        super().data_received(data)
        if was_in_head and self._in_head and self._heads == heads:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes_max:
                self._refuse_head(f"more than {self._limits.header_bytes_max} bytes")

    def on_headers_complete(self) -> None:
        """Start the call, unless its head is too large."""
        self._heads, self._head_bytes, self._in_head = self._heads + 1, 0, False
        limits, size = self._limits, len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        if size > limits.header_bytes_max:
            self._refuse_head(f"{size} bytes")
        elif len(self.headers) > limits.headers_max:
            self._refuse_head(f"{len(self.headers)} of them")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body; nobody waits for that of a call that was refused."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head begins."""
        self._in_head = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def _refuse_head(self, found: str) -> None:
        """Answer and close; close alone where another answer is under way."""
        if self.transport.is_closing():
            return
        if not self._is_free:
            self.transport.close()
            return
        limits = self._limits
        self._answer_and_close(
            HeadersTooLarge(
                f"headers: expected at most {limits.headers_max} with at most "
                f"{limits.header_bytes_max} bytes together, found {found}"
            )
        )


def connection_factory(limits: GatewaySettings) -> Callable[..., BoundedProtocol]:
    """What makes a connection's protocol, for `uvicorn.Config(http=...)`."""
    return functools.partial(BoundedProtocol, limits=limits)
