"""What keeps web pages from using a gateway that their visitor's browser can reach.

By DNS rebinding a page's own name may lead here, so `Host` has to be a name of ours. A page may
send forms and text anywhere without asking, so calls are JSON alone (`Bodies`), for
which browsers ask first, and an `Origin` that is not our own has to be in the settings. Whoever is
no browser sends no `Origin`, and notices nothing.
"""

import re
from collections.abc import Iterable
from typing import Any

from starlette.types import Message, Scope, Send

from schemas.errors import Forbidden
from streams.gateway.config import GatewaySettings

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = "*"
_PREFLIGHT_S = b"600"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(?::\d*)?")
_WANTED = b"access-control-request-headers"


class Pages:
    """Which names are ours, and which pages may call."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._hosts = {*_LOOPBACK, settings.host, *(h.lower() for h in settings.allowed_hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in settings.allowed_origins}

    def check(self, scope: Scope) -> bytes:
        """The foreign origin that calls, empty where none does; raises Forbidden."""
        host = origin = b""
        for name, value in scope["headers"]:
            if name == b"host":
                self._check_host(host := value, scope)
            elif name == b"origin":
                origin = value
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
        found = _HOST.fullmatch(value.decode("latin-1").lower())
        name = found[1].strip("[]") if found is not None else ""
        reached = (scope.get("server") or ("",))[0]  # the address that the client has called
        if name not in self._hosts and name != reached and _ANY not in self._hosts:
            raise Forbidden(
                f"Host: {value.decode('latin-1')[:80]!r} is no name of this gateway; "
                "add it to gateway.allowed_hosts"
            )


def allowing(origin: bytes, send: Send) -> Send:
    """Tell the browser with each answer that this page may read it."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"access-control-allow-origin", origin)]
            headers += [(b"vary", b"origin"), (b"access-control-expose-headers", b"*")]
            message = {**message, "headers": headers}
        await send(message)

    return answer


def is_question(scope: Scope) -> bool:
    """A browser asks whether a page may send what it wants to."""
    asks = any(name == b"access-control-request-method" for name, _ in scope["headers"])
    return bool(scope["method"] == "OPTIONS" and asks)


async def say_yes(scope: Scope, send: Send) -> None:
    """The answer to that question; who asks was checked."""
    wanted = [value for name, value in scope["headers"] if name == _WANTED]
    allowed: Iterable[Any] = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", b", ".join(wanted)),
        (b"access-control-max-age", _PREFLIGHT_S),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": [*allowed]})
    await send({"type": "http.response.body", "body": b""})
