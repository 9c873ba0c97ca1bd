"""Connections that hold a place and do nothing with it: half a head, half a body, an unread answer.

uvicorn waits for all of these without end. Each connection notes what it waits for and since when,
and the server looks at all of them several times a second: no timer per request. What a call may
cost beyond that is its deadline's (`state.py`), which ends the connection of who does not read.
"""

import asyncio
from typing import Any

from schemas.errors import RequestTooSlow, TooManyRequests
from streams.gateway.config import GatewaySettings
from streams.gateway.http.connection import HttpConnection
from streams.gateway.http.exchange import ABORT

_HEAD, _BODY = "head", "body"


class PatientProtocol(HttpConnection):
    """One connection, that is waited for as long as the settings say."""

    def __init__(self, *args: Any, limits: GatewaySettings, **kwargs: Any) -> None:
        super().__init__(*args, limits=limits, **kwargs)
        self._waits_for = ""  # which part of a request is not complete
        self._since_s = 0.0
        self._unread_s = 0.0  # since when the client has not read; 0: it reads
        self._closing_s = 0.0  # since when the rest is being sent before the end; likewise
        self._free_s = 0.0  # since when a request may come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for a head; one connection too many is told so and closed."""
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
            self.transport.close()  # it holds a place until it has read that

    def on_message_begin(self) -> None:
        """The first byte of a request; the first one's time began with the connection."""
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
        """The next request may come."""
        super().on_response_complete()
        self._free_s = self.loop.time()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._unread_s = self.loop.time()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self._unread_s = 0.0

    def end_if_late(self, now_s: float) -> None:
        """End the connection if it makes us wait too long."""
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
                self.transport.close()  # its client sends on and on
        elif self.pipeline:  # what follows an answer that is under way has to wait itself
            self._since_s = now_s
        elif self._waits_for == _BODY and late_ms > limits.body_ms:
            self._refuse_late(limits.body_ms)
        elif self._waits_for == _HEAD and late_ms > limits.head_ms and self.is_free:
            self._refuse_late(limits.head_ms)

    def may_be_reused(self, now_s: float) -> bool:
        """Whether its client may be about to use it, and does not know that we stop."""
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
