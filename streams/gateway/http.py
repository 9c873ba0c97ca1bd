"""The little HTTP that the generating endpoints do themselves, straight on ASGI, because it is on
the path.

Reading a bounded body, headers as a dictionary, keys, and sending a whole response.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from schemas.errors import BodyTooLarge, Cancelled, InvalidRequest, TriviumError, Unauthorized
from streams.gateway.errors import error_body, retry_headers
from streams.gateway.hub import Call

RawHeaders = Mapping[bytes, bytes]
HeaderList = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Headers by lower-case name; the last one counts."""
    return dict(scope["headers"])


async def read_body(headers: RawHeaders, receive: Receive, bytes_max: int) -> bytes:
    """The whole body; raises BodyTooLarge as soon as that is known."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > bytes_max:
        raise BodyTooLarge(f"body: expected at most {bytes_max} bytes, found {int(announced)}")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Cancelled("the client hung up before its body was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise BodyTooLarge(f"body: expected at most {bytes_max} bytes, found more")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


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
    """An error as the whole response; an unread body closes the connection."""
    extra = retry_headers(error.http_status, retry_after_s)
    if isinstance(error, BodyTooLarge):
        extra.append((b"connection", b"close"))
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
