"""One HTTP request and how it is answered, straight on ASGI: all that an endpoint of the path gets.

Bodies are read within bounds, answers leave whole, as an error, or by `send` as a stream. What is
asked for is decided elsewhere.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from schemas.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    TriviumError,
    Unauthorized,
    UnsupportedMedia,
)
from schemas.log.cancellation import cancel_and_wait
from schemas.log.clock import wall_ms
from streams.gateway.fair_share import FairShare
from streams.gateway.http.errors import error_body, retry_headers

Result = TypeVar("Result")
RawHeaders = Mapping[bytes, bytes]
HeaderList = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
ABORT = "trivium.abort"  # among the extensions of a scope, see `slow_clients.py`


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Headers by lower-case name; the last one counts."""
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
        self.tenant = ""  # whose key was used, once that is known
        self.call_id = ""  # under which it is answered, likewise
        self.reply_headers: HeaderList = []  # of the answer; an error carries them too
        self._receive = receive

    async def read_body(self, reader: "BodyReader") -> bytes:
        """The whole body; raises what `BodyReader.read` raises."""
        return await reader.read(self.headers, self._receive, self.tenant)

    async def send_whole(self, body: bytes, headers: Iterable[Any]) -> None:
        """An answer in one piece."""
        await send_whole(self.send, 200, body, headers)

    async def send_error(self, error: TriviumError, retry_after_s: int) -> None:
        """An error as the whole answer."""
        await send_error(self.send, error, self.reply_headers, retry_after_s)

    def on_hang_up(self, notify: Callable[[], None]) -> asyncio.Task[None]:
        """A task that notifies when the client hangs up; cancel it when the answer is written."""
        return asyncio.get_running_loop().create_task(self._wait_for_hang_up(notify))

    async def _wait_for_hang_up(self, notify: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        notify()

    def abort_connection(self) -> None:
        """End the connection at once, whatever was not sent yet."""
        abort = (self.scope.get("extensions") or {}).get(ABORT)
        if abort is not None:
            abort()

    def number(self, name: str, minimum: int, maximum: int) -> int | None:
        """A whole number in a header, if it is there; raises InvalidRequest."""
        value = self.headers.get(name.encode())
        if value is None:
            return None
        text = value.strip()
        if not text.isdigit() or len(text) > 15 or not minimum <= int(text) <= maximum:
            raise InvalidRequest(
                f"{name}: expected a whole number from {minimum} to {maximum}, "
                f"found {value.decode('latin-1')[:40]!r}",
                name,
            )
        return int(text)


class BodyReader:
    """Reads bodies, each and all of them together bounded."""

    def __init__(self, *, bytes_max: int, share: FairShare) -> None:
        """`places` are for bytes of bodies that are not whole yet."""
        self._bytes_max = bytes_max
        self._share = share

    async def read(self, headers: RawHeaders, receive: Receive, tenant: str) -> bytes:
        """The whole body of a tenant's call.

        Raises BodyTooLarge as soon as that is known, TooManyRequests where other calls bring too
        much already, and UnsupportedMedia where it is not said to be JSON: anything else a web page
        may send without being asked (`entry.py`).
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
        """One more part; returns whether there is more to come."""
        message = await receive()
        if message["type"] != "http.request":
            raise Cancelled("the client hung up before its body was complete")
        body += message.get("body", b"")
        if len(body) > self._bytes_max:
            raise BodyTooLarge(f"body: expected at most {self._bytes_max} bytes, found more")
        return bool(message.get("more_body", False))


async def send_whole(send: Send, status: int, body: bytes, headers: Iterable[Any]) -> None:
    """One response in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send, error: TriviumError, headers: HeaderList, retry_after_s: int
) -> None:
    """An error as the whole response.

    What is still coming of a body is read and forgotten (`slow_clients.py` says how long): a client
    that is cut off while it sends would never see the answer.
    """
    extra = retry_headers(error.http_status, retry_after_s)
    if isinstance(error, Unauthorized):
        extra.append((b"www-authenticate", b"Bearer"))
    await send_whole(send, error.http_status, error_body(error), [*headers, *extra])


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What work comes to, of a request whose body is read; raises Cancelled where its client hangs
    up first, and then the work is given up.
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
