"""The entry of every HTTP request: checks who may call, selects the endpoint, and reads the body.

It prevents web pages from using a gateway that their visitor's browser can reach. By DNS rebinding,
a page's own name may lead here, so `Host` has to be one of the gateway's names. A page may send
forms and text anywhere without a preflight request, so calls must be JSON (`BodyReader`), for which
browsers send one. An `Origin` that is not the gateway's own has to be in the settings. Clients that
are no browsers send no `Origin`. Starlette's middlewares do neither: they pass on the calls of
foreign pages, do not know the address that a client reached, and answer in their own form.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import (
    BodyTooLarge,
    Cancelled,
    Forbidden,
    InvalidRequest,
    TriviumError,
    Unauthorized,
    UnsupportedMedia,
)
from streams.calls.config import GatewaySettings
from streams.calls.errors import error_body, retry_headers
from streams.calls.ids import new_request_id
from streams.calls.in_flight import FairShare
from streams.calls.request.body import Body, parse
from streams.calls.requests import RawHeaders
from streams.gateway.http.encodings import ACCEPTED, HEADER, decode_body, encoding_of
from streams.gateway.http.uploads import Uploads
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms

logger = logging.getLogger(__name__)
BUG = "an error of the gateway; its log has the details"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = "*"
_PREFLIGHT_S = b"600"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(?::\d*)?")
_REQUEST_HEADERS = b"access-control-request-headers"
Handler = Callable[["HttpExchange"], Awaitable[str]]  # returns the outcome for the metrics
CountOutcome = Callable[[str, str], None]
Result = TypeVar("Result")
HeaderList = list[tuple[bytes, bytes]]
ErrorForm = Callable[[TriviumError, str], tuple[int, bytes]]  # by request id: status and body
JSON = (b"content-type", b"application/json")
ABORT = "trivium.abort"  # an extension of the scope, see `slow_clients.py`


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return headers by lower-case name; of repeated ones, the last counts."""
    return dict(scope["headers"])


def openai_error(error: TriviumError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error in OpenAI's form, which has no request id."""
    return error.http_status, error_body(error)


class RootApp:
    """The app that the server calls: POSTs that generate go to their endpoints, other calls to
    FastAPI.

    FastAPI's middleware would wrap every write of every stream.
    """

    def __init__(
        self, fastapi: FastAPI, posts: Mapping[str, ASGIApp], settings: GatewaySettings
    ) -> None:
        self.fastapi = fastapi
        self._posts = posts
        self._guard = PageGuard(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp | None = None
        if scope["type"] == "http":
            try:
                origin = self._guard.check(scope)
                has_encoding = any(name == HEADER for name, _ in scope["headers"])
                encoding = encoding_of(scope) if has_encoding else ""
            except TriviumError as error:
                request_id = new_request_id(wall_ms())
                headers = [(b"x-request-id", request_id.encode())]
                if isinstance(error, UnsupportedMedia):
                    headers.append((b"accept-encoding", ACCEPTED))
                form = getattr(self._posts.get(scope["path"]), "error_form", openai_error)
                await send_error(send, error, headers, form, request_id)
                return
            if encoding:
                receive = decode_body(encoding, receive)
            if scope["method"] == "HEAD":
                scope, send = {**scope, "method": "GET"}, _head_alone(send)
            if origin:
                send = _with_cors_headers(origin, send)
                if _is_preflight(scope):
                    await _answer_preflight(scope, send)
                    return
            if scope["method"] == "POST":
                app = self._posts.get(scope["path"])
        await (app or self.fastapi)(scope, receive, send)


class AsgiEndpoint:
    """An ASGI app around a handler: it sends errors in the form of its API, and counts outcomes."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        count_outcome: CountOutcome,
        error_form: ErrorForm = openai_error,
    ) -> None:
        self.error_form = error_form
        self._name = name
        self._handler = handler
        self._count_outcome = count_outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            outcome = await self._handler(exchange)
        except TriviumError as error:
            outcome = error.code
            await exchange.send_error(error, self.error_form)
        except Exception:
            outcome = TriviumError.code
            logger.exception("%s: a bug", self._name)
            # This fails if the response has begun; then the server closes the connection.
            await exchange.send_error(TriviumError(BUG), self.error_form)
        self._count_outcome(self._name, outcome)


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

    def begin(self, callers: "Callers") -> None:
        """Give the call its id, and find its tenant; raises Unauthorized."""
        self.call_id = new_request_id(self.arrived_ms)
        self.reply_headers.append((b"x-request-id", self.call_id.encode()))
        self.tenant = callers.keys.tenant(self.headers)

    async def read_body(self, reader: "BodyReader") -> bytes:
        """Read the whole body; raises the errors of `BodyReader.read`."""
        return await reader.read(self.headers, self._receive, self.tenant)

    async def send_whole(self, body: bytes, headers: Iterable[Any]) -> None:
        """Send an answer in one piece."""
        await send_whole(self.send, 200, body, headers)

    async def send_error(self, error: TriviumError, form: ErrorForm = openai_error) -> None:
        """Send an error as the whole answer."""
        await send_error(self.send, error, self.reply_headers, form, self.call_id)

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


class Callers:
    """Who may call, and how much they may send: API keys, and readers of bodies and forms."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.keys = Keys(settings.api_keys)
        self.body_reader = BodyReader(
            bytes_max=settings.body_bytes_max,
            share=FairShare(settings.bodies_bytes_max, tenants=settings.tenants),
        )
        self.uploads = Uploads(
            bytes_max=settings.file_bytes_max,
            share=FairShare(settings.uploads_max, tenants=settings.tenants),
        )

    def tenant_of(self, request: Request) -> str:
        """Return the tenant whose API key was used; raises Unauthorized."""
        return self.keys.tenant(headers_of(request.scope))

    async def read_body(self, request: Request, kind: type[Body]) -> Body:
        """Read and parse the JSON body of a call; raises InvalidRequest."""
        headers, tenant = headers_of(request.scope), self.tenant_of(request)
        raw = await self.body_reader.read(headers, request.receive, tenant)
        return parse(kind, raw)


class Keys:
    """The API keys by their hash, so that neither comparisons nor logs reveal them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = {_digest(key.encode()): _digest(key.encode()).hex()[:12] for key in keys}

    def tenant(self, headers: RawHeaders) -> str:
        """Return the tenant of the API key in headers, empty without keys; raises Unauthorized."""
        if not self._tenants:
            return ""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [bearer] if scheme.lower() == b"bearer" else []
        keys.append(headers.get(b"x-api-key", b""))  # of Anthropic's clients
        for key in keys:
            if (tenant := self._tenants.get(_digest(key.strip()))) is not None:
                return tenant
        raise Unauthorized(
            "expected `Authorization: Bearer <API key>` or `x-api-key: <API key>` with a known key"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def send_whole(send: Send, status: int, body: bytes, headers: Iterable[Any]) -> None:
    """Send a response in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send,
    error: TriviumError,
    headers: HeaderList,
    form: ErrorForm = openai_error,
    request_id: str = "",
) -> None:
    """Send an error as the whole response.

    The rest of the request's body is read and dropped (`slow_clients.py` limits the time): a client
    that is cut off while it sends would never see the answer.
    """
    status, body = form(error, request_id)
    extra = retry_headers(status)
    if isinstance(error, Unauthorized):
        extra.append((b"www-authenticate", b"Bearer"))
    await send_whole(send, status, body, [*headers, *extra])


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


class PageGuard:
    """Checks the gateway's host names, and the origins of web pages that may call."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._hosts = {*_LOOPBACK, settings.host, *(h.lower() for h in settings.allowed_hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in settings.allowed_origins}

    def check(self, scope: Scope) -> bytes:
        """Return the foreign origin of a call, or an empty text.

        Raises Forbidden, and InvalidRequest for an HTTP/1.1 request without exactly one `Host`.
        """
        hosts, origin = list[bytes](), b""
        for name, value in scope["headers"]:
            if name == b"host":
                self._check_host(value, scope)
                hosts.append(value)
            elif name == b"origin":
                origin = value
        if len(hosts) > 1 or not hosts and scope.get("http_version") == "1.1":
            raise InvalidRequest(f"Host: expected one, found {len(hosts)}")
        host = hosts[0] if hosts else b""
        if not origin or origin.lower() == b"%b://%b" % (scope.get("scheme", "").encode(), host):
            return b""
        text = origin.decode("latin-1").lower()
        if text not in self._origins and _ANY not in self._origins:
            raise Forbidden(
                f"Origin: web pages of {text[:80]!r} may not use this gateway; "
                "allow them in gateway.allowed_origins"
            )
        return origin

    def _check_host(self, value: bytes, scope: Scope) -> None:
        match = _HOST.fullmatch(value.decode("latin-1").lower())
        name = match[1].strip("[]") if match is not None else ""
        reached = (scope.get("server") or ("",))[0]  # the address that the client connected to
        if name not in self._hosts and name != reached and _ANY not in self._hosts:
            raise Forbidden(
                f"Host: {value.decode('latin-1')[:80]!r} is no name of this gateway; "
                "add it to gateway.allowed_hosts"
            )


def _with_cors_headers(origin: bytes, send: Send) -> Send:
    """Add to each answer the headers with which the browser lets this page read it."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"access-control-allow-origin", origin)]
            headers += [(b"vary", b"origin"), (b"access-control-expose-headers", b"*")]
            message = {**message, "headers": headers}
        await send(message)

    return answer


def _head_alone(send: Send) -> Send:
    """Send only the head of the answer to GET, as HEAD needs, and do not wait for a stream."""
    is_begun = False

    async def answer(message: Message) -> None:
        nonlocal is_begun
        if not is_begun:
            is_begun = True
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    return answer


def _is_preflight(scope: Scope) -> bool:
    """Return whether a browser asks if a page may send its request."""
    asks = any(name == b"access-control-request-method" for name, _ in scope["headers"])
    return bool(scope["method"] == "OPTIONS" and asks)


async def _answer_preflight(scope: Scope, send: Send) -> None:
    """Allow the request; its origin was checked before."""
    header_names = [value for name, value in scope["headers"] if name == _REQUEST_HEADERS]
    allowed: Iterable[Any] = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", b", ".join(header_names)),
        (b"access-control-max-age", _PREFLIGHT_S),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": [*allowed]})
    await send({"type": "http.response.body", "body": b""})
