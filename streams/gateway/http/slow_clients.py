"""Ends connections that stay idle in the middle: half a head, half a body, an unread answer.

uvicorn waits for all of these without a limit. Each connection records what it waits for and since
when, and the server checks all connections several times a second: there is no timer per request. A
call may take until its deadline (`streams/calls/in_flight.py`), which also ends the connection of a
client that does not read.
"""

import asyncio
from typing import Any

from schemas.errors import RequestTooSlow, TooManyRequests
from streams.calls.config import GatewaySettings
from streams.gateway.http.connection import HttpConnection
from streams.gateway.http.entry import ABORT

_HEAD, _BODY = "head", "body"


class PatientProtocol(HttpConnection):
    """A connection that waits for its client as long as the settings allow."""

    def __init__(self, *args: Any, limits: GatewaySettings, **kwargs: Any) -> None:
        super().__init__(*args, limits=limits, **kwargs)
        self._waits_for = ""  # the incomplete part of a request
        self._since_s = 0.0
        self._unread_s = 0.0  # since when the client does not read; 0: it reads
        self._closing_s = 0.0  # since when the connection is closing; 0: it is not
        self._free_s = 0.0  # since when the connection is idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for a head; refuse and close a connection above the limit."""
        super().connection_made(transport)
        self._wait_for(_HEAD)
        self._free_s = self.loop.time()
        connections_max = self._limits.connections_max
        if len(self.connections) > connections_max:
            self.refuse(
                TooManyRequests(
                    f"at most {connections_max} connections are served at once; try again later"
                )
            )
            self.transport.close()  # it counts until the client has read that

    def on_message_begin(self) -> None:
        """Start the time of a head; that of the first one began with the connection."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]  # ours
        if self._waits_for != _HEAD:
            self._wait_for(_HEAD)

    def on_headers_complete(self) -> None:
        """Note that the body is awaited from now on."""
        super().on_headers_complete()
        self._wait_for(_BODY)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        super().on_message_complete()
        self._wait_for("")

    def on_response_complete(self) -> None:
        """Record since when the connection is idle."""
        super().on_response_complete()
        self._free_s = self.loop.time()

    def pause_writing(self) -> None:
        """Record since when the client reads slower than the gateway writes."""
        super().pause_writing()
        self._unread_s = self.loop.time()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self._unread_s = 0.0

    def end_if_late(self, now_s: float) -> None:
        """End the connection if its client exceeds a time limit."""
        limits = self._limits
        if self.is_ending:
            self._closing_s = self._closing_s or now_s
        late_ms = (now_s - self._since_s) * 1000
        unread_s = self._unread_s or self._closing_s
        unread_ms = (now_s - unread_s) * 1000 if unread_s else 0
        if unread_ms > limits.write_ms or self.is_reset():
            self.transport.abort()
        elif self._closing_s:
            if self._is_ended and (now_s - self._closing_s) * 1000 > limits.head_ms:
                self.transport.close()  # its client does not stop sending
        elif self.pipeline:  # requests behind an answer in progress have to wait
            self._since_s = now_s
        elif self._waits_for == _BODY and late_ms > limits.body_ms:
            self._refuse_late(limits.body_ms)
        elif self._waits_for == _HEAD and late_ms > limits.head_ms and self.is_free:
            self._refuse_late(limits.head_ms)

    def may_be_reused(self, now_s: float) -> bool:
        """Return whether the client may soon send a request, unaware that the gateway stops."""
        if self.is_ending or not self.is_free:
            return False
        return (now_s - self._free_s) * 1000 < self._limits.linger_ms

    def _wait_for(self, part: str) -> None:
        self._waits_for, self._since_s = part, self.loop.time()

    def _refuse_late(self, limit_ms: int) -> None:
        part = self._waits_for
        self.refuse(
            RequestTooSlow(f"the {part} of the request was not complete within {limit_ms} ms")
        )
        self.transport.close()
