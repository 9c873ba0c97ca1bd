"""The entry of every HTTP request: checks who may call, and selects the endpoint.

It prevents web pages from using a gateway that their visitor's browser can reach. By DNS rebinding,
a page's own name may lead here, so `Host` has to be one of the gateway's names. A page may send
forms and text anywhere without a preflight request, so calls must be JSON (`BodyReader`), for which
browsers send one. An `Origin` that is not the gateway's own has to be in the settings. Clients that
are no browsers send no `Origin`.
"""

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import Forbidden, InvalidRequest, TriviumError, Unauthorized, UnsupportedMedia
from streams.calls.config import GatewaySettings
from streams.calls.ids import new_request_id
from streams.calls.request.options import RawHeaders
from streams.gateway.http.encodings import ACCEPTED, decode_body, encoding_of
from streams.gateway.http.exchange import HttpExchange, send_error
from streams.log.clock import wall_ms

logger = logging.getLogger(__name__)

BUG = "an error of the gateway; its log has the details"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = "*"
_PREFLIGHT_S = b"600"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(?::\d*)?")
_REQUEST_HEADERS = b"access-control-request-headers"

Handler = Callable[[HttpExchange], Awaitable[str]]  # returns the outcome for the metrics
CountOutcome = Callable[[str, str], None]


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
                encoding = encoding_of(scope)
            except TriviumError as error:
                headers = [(b"x-request-id", new_request_id(wall_ms()).encode())]
                if isinstance(error, UnsupportedMedia):
                    headers.append((b"accept-encoding", ACCEPTED))
                await send_error(send, error, headers)
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
    """An ASGI app around a handler: it sends errors as OpenAI bodies, and counts outcomes."""

    def __init__(self, name: str, handler: Handler, count_outcome: CountOutcome) -> None:
        self._name = name
        self._handler = handler
        self._count_outcome = count_outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            outcome = await self._handler(exchange)
        except TriviumError as error:
            outcome = error.code
            await exchange.send_error(error)
        except Exception:
            outcome = TriviumError.code
            logger.exception("%s: a bug", self._name)
            # This fails if the response has begun; then the server closes the connection.
            await exchange.send_error(TriviumError(BUG))
        self._count_outcome(self._name, outcome)


class Keys:
    """The API keys by their hash, so that neither comparisons nor logs reveal them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = {_digest(key.encode()): _digest(key.encode()).hex()[:12] for key in keys}

    def tenant(self, headers: RawHeaders) -> str:
        """Return the tenant of the API key in headers, empty without keys; raises Unauthorized."""
        if not self._tenants:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        tenant = self._tenants.get(_digest(key.strip()))
        if scheme.lower() != b"bearer" or tenant is None:
            raise Unauthorized("expected `Authorization: Bearer <API key>` with a known key")
        return tenant


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
