"""Connections that hold a place and do nothing with it: half a head, half a body, an unread answer.

uvicorn waits for all of these without end. Each connection notes what it waits for and since when,
and the server looks at all of them several times a second: no timer per request. What a call may
cost beyond that is its deadline's (`state.py`), which ends the connection of who does not read.
"""

import asyncio
from typing import Any

from schemas.errors import RequestTooSlow, TooManyRequests, TriviumError
from streams.gateway.config import GatewaySettings
from streams.gateway.http.errors import error_body, retry_headers
from streams.gateway.http.exchange import ABORT
from streams.gateway.http.library import STATUS_LINE, HttpToolsProtocol

_HEAD, _BODY = "head", "body"


class PatientProtocol(HttpToolsProtocol):
    """One connection, that is waited for as long as the settings say."""

    def __init__(self, *args: Any, limits: GatewaySettings, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
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
        most = self._limits.connections_max
        if len(self.connections) > most:
            self._answer_and_close(
                TooManyRequests(f"at most {most} connections are served at once; try again later")
            )

    def on_message_begin(self) -> None:
        """The first byte of a request; the first one's time began with the connection."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]  # ours
        if self._waits_for != _HEAD:
            self._wait_for(_HEAD)

    def on_headers_complete(self) -> None:
        """Wait for the body."""
        super().on_headers_complete()
        self._wait_for(_BODY)

    def on_message_complete(self) -> None:
        """The request is whole."""
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
        """It has read."""
        super().resume_writing()
        self._unread_s = 0.0

    def end_if_late(self, now_s: float) -> None:
        """End the connection if it makes us wait too long."""
        limits = self._limits
        if self.transport.is_closing():
            self._closing_s = self._closing_s or now_s
        late_ms = (now_s - self._since_s) * 1000
        unread_s = self._unread_s or self._closing_s
        if unread_s and (now_s - unread_s) * 1000 > limits.write_ms:
            self.transport.abort()
        elif self._closing_s:
            return
        elif self.pipeline:  # what follows an answer that is under way has to wait itself
            self._since_s = now_s
        elif self._waits_for == _BODY and late_ms > limits.body_ms:
            self._refuse_late(limits.body_ms)
        elif self._waits_for == _HEAD and late_ms > limits.head_ms and self._is_free:
            self._refuse_late(limits.head_ms)

    def is_kept(self, now_s: float) -> bool:
        """Whether its client may be about to use it, and does not know that we stop."""
        if self.transport.is_closing() or not self._is_free:
            return False
        return (now_s - self._free_s) * 1000 < self._limits.linger_ms

    @property
    def _is_free(self) -> bool:
        """No answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for(self, part: str) -> None:
        self._waits_for, self._since_s = part, self.loop.time()

    def _refuse_late(self, limit_ms: int) -> None:
        begun = self.cycle is not None and self.cycle.response_started
        if not begun or self._waits_for == _HEAD:
            self._answer_and_close(
                RequestTooSlow(
                    f"the {self._waits_for} of the request was not complete within {limit_ms} ms"
                )
            )
        else:
            self.transport.close()

    def _answer_and_close(self, error: TriviumError) -> None:
        """Answer without a call, and close."""
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *retry_headers(error.http_status, self._limits.retry_after_s),
        ]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[error.http_status] + head + b"\r\n" + body)
        self.transport.close()
