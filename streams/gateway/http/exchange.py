"""The little HTTP that the generating endpoints do themselves, straight on ASGI, because it is on
the path.

Reading a bounded body, headers as a dictionary, keys, and sending a whole response.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from schemas.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    TooManyRequests,
    TriviumError,
    Unauthorized,
    UnsupportedMedia,
)
from streams.gateway.http.errors import error_body, retry_headers
from streams.gateway.stream.hub import Call

RawHeaders = Mapping[bytes, bytes]
HeaderList = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
CUT = "trivium.cut"  # among the extensions of a scope, see `connections.py`


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Headers by lower-case name; the last one counts."""
    return dict(scope["headers"])


def cut_of(scope: Scope) -> Callable[[], None]:
    """What ends the connection of a call at once, whatever was not sent yet."""
    found: Callable[[], None] = (scope.get("extensions") or {}).get(CUT, _nothing)
    return found


def _nothing() -> None:
    pass


class Bodies:
    """Reads bodies, each and all of them together bounded."""

    def __init__(self, *, bytes_max: int, together_max: int) -> None:
        self._bytes_max = bytes_max
        self._together_max = together_max
        self._held = 0  # bytes of bodies that are not whole yet

    async def read(self, headers: RawHeaders, receive: Receive) -> bytes:
        """The whole body.

        Raises BodyTooLarge as soon as that is known, TooManyRequests where other calls bring too
        much already, and UnsupportedMedia where it is not said to be JSON: anything else a web page
        may send without being asked (`pages.py`).
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
        body = bytearray()
        try:
            while await self._read_part(body, receive):
                pass
        finally:
            self._held -= len(body)
        return bytes(body)

    async def _read_part(self, body: bytearray, receive: Receive) -> bool:
        """One more part; returns whether there is more to come."""
        message = await receive()
        if message["type"] != "http.request":
            raise Cancelled("the client hung up before its body was complete")
        part = message.get("body", b"")
        body += part
        self._held += len(part)
        if len(body) > self._bytes_max:
            raise BodyTooLarge(f"body: expected at most {self._bytes_max} bytes, found more")
        if self._held > self._together_max:
            raise TooManyRequests(
                f"at most {self._together_max} bytes of bodies are read at once, and other calls "
                "bring as much; try again later"
            )
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

    What is still coming of a body is read and forgotten (`connections.py` says how long): a client
    that is cut off while it sends would never see the answer.
    """
    extra = retry_headers(error.http_status, retry_after_s)
    if isinstance(error, Unauthorized):
        extra.append((b"www-authenticate", b"Bearer"))
    await send_whole(send, error.http_status, error_body(error), [*headers, *extra])


async def watch(receive: Receive, call: Call) -> None:
    """Tell a call when its client hangs up; runs beside the answer and ends with it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.hang_up()


def start_watch(receive: Receive, call: Call) -> asyncio.Task[None]:
    """`watch` as a task."""
    return asyncio.get_running_loop().create_task(watch(receive, call))


class Keys:
    """API keys by their hash, so that neither comparison nor log shows them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = {_digest(key.encode()): _digest(key.encode()).hex()[:12] for key in keys}

    def tenant(self, headers: RawHeaders) -> str:
        """Whose key was used; raises Unauthorized. Empty where no keys are set."""
        if not self._tenants:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        tenant = self._tenants.get(_digest(key.strip()))
        if scheme.lower() != b"bearer" or tenant is None:
            raise Unauthorized("expected `Authorization: Bearer <API key>` with a known key")
        return tenant


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def number_header(headers: RawHeaders, name: str, least: int, most: int) -> int | None:
    """A whole number in a header; raises InvalidRequest."""
    value = headers.get(name.encode())
    if value is None:
        return None
    text = value.strip()
    if not text.isdigit() or len(text) > 15 or not least <= int(text) <= most:
        raise InvalidRequest(
            f"{name}: expected a whole number from {least} to {most}, "
            f"found {value.decode('latin-1')[:40]!r}",
            name,
        )
    return int(text)
