"""One HTTP request and its answer, directly on ASGI, for the plain ASGI endpoints.

Bodies are read within limits. Answers are sent whole, as an error, or by `send` as a stream. The
meaning of a request is decided elsewhere.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from schemas.errors import (
    BodyTooLarge,
    Cancelled,
    TriviumError,
    Unauthorized,
    UnsupportedMedia,
)
from streams.calls.errors import error_body, retry_headers
from streams.calls.fair_share import FairShare
from streams.calls.request.options import RawHeaders
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms

Result = TypeVar("Result")
HeaderList = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
ABORT = "trivium.abort"  # an extension of the scope, see `slow_clients.py`


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return headers by lower-case name; of repeated ones, the last counts."""
    return dict(scope["headers"])


class HttpExchange:
    """One HTTP request and its answer."""

    __slots__ = (
        "_receive",
        "arrived_ms",
        "arrived_s",
        "call_id",
        "headers",
        "reply_headers",
        "scope",
        "send",
        "tenant",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers = headers_of(scope)
        self.send = send
        self.arrived_s = asyncio.get_running_loop().time()
        self.arrived_ms = wall_ms()
        self.tenant = ""  # of the API key; set by the endpoint
        self.call_id = ""  # the request id; set by the endpoint
        self.reply_headers: HeaderList = []  # of the answer, also of an error
        self._receive = receive

    async def read_body(self, reader: "BodyReader") -> bytes:
        """Read the whole body; raises the errors of `BodyReader.read`."""
        return await reader.read(self.headers, self._receive, self.tenant)

    async def send_whole(self, body: bytes, headers: Iterable[Any]) -> None:
        """Send an answer in one piece."""
        await send_whole(self.send, 200, body, headers)

    async def send_error(self, error: TriviumError) -> None:
        """Send an error as the whole answer."""
        await send_error(self.send, error, self.reply_headers)

    def on_hang_up(self, notify: Callable[[], None]) -> asyncio.Task[None]:
        """Return a task that calls `notify` when the client disconnects; cancel it after the
        answer."""
        return asyncio.get_running_loop().create_task(self._wait_for_hang_up(notify))

    async def _wait_for_hang_up(self, notify: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        notify()

    def abort_connection(self) -> None:
        """Close the connection at once, and discard unsent data."""
        abort = (self.scope.get("extensions") or {}).get(ABORT)
        if abort is not None:
            abort()


class BodyReader:
    """Reads bodies within a limit for each, and one for all together."""

    def __init__(self, *, bytes_max: int, share: FairShare) -> None:
        """Set the limits. `share` counts the bytes of bodies that are not complete."""
        self._bytes_max = bytes_max
        self._share = share

    async def read(self, headers: RawHeaders, receive: Receive, tenant: str) -> bytes:
        """Read the whole body of a tenant's call.

        Raises BodyTooLarge as soon as the size is known, TooManyRequests if the bodies of all calls
        exceed the limit, and UnsupportedMedia if it is not declared as JSON: web pages may send
        other types without a preflight request (`entry.py`).
        """
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != JSON[1]:
            raise UnsupportedMedia(
                f"Content-Type: expected application/json, found {kind.decode('latin-1')[:60]!r}"
            )
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._bytes_max:
            raise BodyTooLarge(
                f"body: expected at most {self._bytes_max} bytes, found {int(announced)}"
            )
        body, reserved_bytes = bytearray(), 0
        try:
            while await self._read_part(body, receive):
                self._share.take(tenant, "bytes of bodies", len(body) - reserved_bytes)
                reserved_bytes = len(body)
        finally:
            self._share.give_back(tenant, reserved_bytes)
        return bytes(body)

    async def _read_part(self, body: bytearray, receive: Receive) -> bool:
        """Read one more part; return whether more parts follow."""
        message = await receive()
        if message["type"] != "http.request":
            raise Cancelled("the client hung up before its body was complete")
        body += message.get("body", b"")
        if len(body) > self._bytes_max:
            raise BodyTooLarge(f"body: expected at most {self._bytes_max} bytes, found more")
        return bool(message.get("more_body", False))


async def send_whole(send: Send, status: int, body: bytes, headers: Iterable[Any]) -> None:
    """Send a response in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: TriviumError, headers: HeaderList) -> None:
    """Send an error as the whole response.

    The rest of the request's body is read and dropped (`slow_clients.py` limits the time): a client
    that is cut off while it sends would never see the answer.
    """
    extra = retry_headers(error.http_status)
    if isinstance(error, Unauthorized):
        extra.append((b"www-authenticate", b"Bearer"))
    await send_whole(send, error.http_status, error_body(error), [*headers, *extra])


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work` for a request whose body is read.

    If the client disconnects first, cancels `work` and raises Cancelled.
    """

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work_task, hang_up_task = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait([work_task, hang_up_task], return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise Cancelled("the client hung up")
    finally:
        await cancel_and_wait(work_task, hang_up_task)
