"""Requests byte by byte as real clients send them, over a real socket; the standard library's own
client reads what comes back. Recorded where that was possible (Java's, Go's, Node's, curl), else
written as the client's source has it.
"""

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from streams.gateway.http.connection import HttpConnection
from tests.streams.gateway.in_process import InProcessGateway, serving
from tests.streams.gateway.raw_connection import ReadBytes, raw_connection
from tests.streams.gateway.samples import chat, events_of, text_of

BODY, STREAM = json.dumps(chat()).encode(), json.dumps(chat(stream=True)).encode()
JSON = b"Content-Type: application/json\r\n"
# Java writes the head alone, then the body, and offers anew with each request.
JAVA = (
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n%b"
    b"Host: 127.0.0.1:8000\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
    b"%bUpgrade: h2c\r\nUser-Agent: Java-http-client/17.0.15\r\n" + JSON + b"\r\n"
)
CURL = b"Host: 127.0.0.1:8000\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\n"
CURL_H2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
UNDICI = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\nconnection: keep-alive\r\n"
    b"content-type: application/json\r\naccept: */*\r\naccept-language: *\r\n"
    b"sec-fetch-mode: cors\r\nuser-agent: node\r\naccept-encoding: gzip, deflate\r\n"
)
POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
GO = POST + b"Host: 127.0.0.1:8000\r\nUser-Agent: Go-http-client/1.1\r\n"
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


def length(body: bytes = BODY) -> bytes:
    return b"Content-Length: %d\r\n" % len(body)


def chunks(body: bytes = BODY, size: int = 1 << 20, trailers: bytes = b"") -> bytes:
    """A body in chunks, their sizes as .NET writes them."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%X\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n%b\r\n" % trailers


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is expected."""

    status: int = 200
    text: str = "Hello"  # of the chat; else something that stands in the body
    headers: dict[str, str] = field(default_factory=dict)
    lacks: str = ""  # a header that is not there
    method: str = "POST"


CHAT, BAD = Answer(), Answer(status=400, text='"code":"invalid_request"')
OLD = Answer(lacks="transfer-encoding", headers={"connection": "close"})
OK = Answer(text="", headers={"content-length": "0"}, method="GET")

SENT: dict[str, tuple[bytes, Sequence[Answer]]] = {
    # Offers of another protocol, which may be ignored (RFC 9110, 7.8)
    "java": ((JAVA % (length(), b"") + BODY) * 2, [CHAT, CHAT]),
    "java-expects": (
        JAVA % (b"Expect: 100-Continue\r\n", b"Transfer-encoding: chunked\r\n") + chunks(),
        [CHAT],
    ),
    "java-streams": (JAVA % (length(STREAM), b"") + STREAM, [CHAT]),
    "java-gets": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + CURL_H2 + b"\r\n" + GET % b"/health",
        [OK, OK],
    ),
    "curl-http2": (
        POST + CURL + CURL_H2 + JSON + length() + b"\r\n" + BODY,
        [CHAT],
    ),
    "apache-httpclient": (
        b"POST /v1/chat/completions HTTP/1.1\r\nAccept-Encoding: gzip, x-gzip, deflate\r\n"
        + length() + JSON + b"Host: localhost:8000\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n"
        b"User-Agent: Apache-HttpClient/5.4 (Java/17)\r\n\r\n" + BODY,
        [CHAT],
    ),
    "websocket": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        [OK],
    ),
    "nginx-for-websockets": (
        b"POST /v1/chat/completions HTTP/1.1\r\nConnection: upgrade\r\nHost: localhost\r\n"
        + length() + JSON + b"\r\n" + BODY,
        [CHAT],
    ),
    # Plain calls, with a length and in chunks
    "undici": (UNDICI + length() + b"\r\n" + BODY, [CHAT]),
    "undici-streams": (UNDICI + b"transfer-encoding: chunked\r\n\r\n" + chunks(size=7), [CHAT]),
    "go": (GO + length() + JSON + b"Accept-Encoding: gzip\r\n\r\n" + BODY, [CHAT]),
    "go-trailers": (
        GO + b"Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n" + JSON + b"\r\n"
        + chunks(trailers=b"X-Sum: 1\r\n") + GET % b"/health",
        [CHAT, OK],
    ),
    "dotnet": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:8000\r\n"
        b"Transfer-Encoding: chunked\r\nContent-Type: application/json; charset=utf-8\r\n\r\n"
        + chunks(),
        [CHAT],
    ),
    "envoy": (
        POST + b"host: localhost\r\ncontent-type: application/json\r\n"
        b"x-forwarded-proto: http\r\nx-request-id: 8e6f2c3a-4d1f-9a55-8c9e-0d6e1f5b7a10\r\n"
        b"x-envoy-expected-rq-timeout-ms: 15000\r\ntransfer-encoding: chunked\r\n\r\n" + chunks(),
        [CHAT],
    ),
    "proxied": (GET.replace(b"%b", b"http://localhost%b") % b"/health", [OK]),
    "empty-lines-before": (b"\r\n\r\n" + GET % b"/health", [OK]),
    "pipelined": (
        GO + length(STREAM) + JSON + b"\r\n" + STREAM + GET % b"/health" + GET % b"/v1/none",
        [CHAT, OK, Answer(status=404, text='"code":"not_found"', method="GET")],
    ),
    # HTTP/1.0, which knows no chunks
    "nginx": (
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\n"
        + length() + JSON + b"\r\n" + BODY,
        [OLD],
    ),
    "nginx-streams": (
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\n"
        + length(STREAM) + JSON + b"\r\n" + STREAM,
        [OLD],
    ),
    "ab": (
        b"POST /v1/chat/completions HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-length: %d\r\n"
        b"Content-type: application/json\r\nHost: localhost:8000\r\nUser-Agent: ApacheBench/2.3\r\n"
        b"Accept: */*\r\n\r\n%b" % (len(STREAM), STREAM),
        [OLD],
    ),
    "1.0-expects": (
        b"POST /v1/chat/completions HTTP/1.0\r\nExpect: 100-continue\r\n" + length() + JSON
        + b"\r\n" + BODY,
        [OLD],
    ),
    "haproxy-checks": (b"GET /health HTTP/1.0\r\n\r\n", [OK]),
    "kube-probe": (
        b"GET /health HTTP/1.1\r\nHost: localhost:8000\r\nUser-Agent: kube-probe/1.31\r\n"
        b"Accept: */*\r\nConnection: close\r\n\r\n",
        [OK],
    ),
    # Heads alone
    "curl-head": (
        b"HEAD /v1/models HTTP/1.1\r\n" + CURL + b"\r\n" + b"HEAD /health HTTP/1.1\r\n" + CURL
        + b"\r\n" + b"HEAD /v1/chat/completions HTTP/1.1\r\n" + CURL + b"\r\n",
        [
            Answer(text="", method="HEAD", lacks="transfer-encoding"),
            Answer(text="", method="HEAD", headers={"content-length": "0"}),
            Answer(text="", method="HEAD", status=405, headers={"allow": "POST"}),
        ],
    ),
    # What cannot be served
    "no-host": (b"GET /health HTTP/1.1\r\n\r\n", [BAD]),
    "two-hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", [BAD]),
    "connect": (b"CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n", [BAD]),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [BAD]),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00", [BAD]),
    "two-lengths": (
        GO + length() + b"Transfer-Encoding: chunked\r\n" + JSON + b"\r\n" + chunks(), [BAD],
    ),
    "no-chunk": (GO + b"Transfer-Encoding: chunked\r\n" + JSON + b"\r\nnone\r\n", [BAD]),
    "behind-a-stream": (
        GO + length(STREAM) + JSON + b"\r\n" + STREAM + b"no request\r\n\r\n", [CHAT, BAD],
    ),
    "unknown": (
        GET % b"/v1/assistants"
        + b"POST /v1/responses/input_tokens HTTP/1.1\r\n" + CURL + length(b"{}") + b"\r\n{}"
        + GET % b"/v1/chat/completions",
        [
            Answer(status=404, text='"code":"not_found"', method="GET"),
            Answer(status=404, text='"code":"not_found"'),
            Answer(status=405, text='"code":"method_not_allowed"', headers={"allow": "POST"}),
        ],
    ),
}  # fmt: skip


def read_answers(data: bytes, expected: Sequence[Answer]) -> None:
    """Check what came back; there is nothing more."""
    sock = ReadBytes(data)
    for reference in expected:
        response = http.client.HTTPResponse(sock, method=reference.method)
        response.begin()
        body = response.read().decode()
        headers = {name.lower(): value for name, value in response.getheaders()}
        assert response.status == reference.status, body
        assert reference.headers.items() <= headers.items()
        assert reference.lacks not in headers
        if reference is CHAT or reference is OLD:
            is_stream = headers["content-type"].startswith("text/event-stream")
            answer = text_of(events_of(body)) if is_stream else content_of(body)
            assert answer == reference.text
            assert not is_stream or body.startswith("data: ") and body.endswith("data: [DONE]\n\n")
        else:
            assert reference.text in body
    assert sock.makefile("rb").read() == b""


def content_of(body: str) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


def answering(**settings: Any) -> InProcessGateway:
    gateway = InProcessGateway(**settings)
    gateway.answer_with("Hel", "lo")
    return gateway


async def talk() -> None:
    """All of them, each on a connection of its own."""
    async with serving(answering()) as url:
        for name, (payload, expected) in SENT.items():
            async with raw_connection(url, payload, ends=True) as reader:
                answers = await reader.read()
            try:
                read_answers(answers, expected)
            except (AssertionError, http.client.HTTPException) as error:
                error.add_note(f"{name}: {answers[:2_000]!r}")
                raise


async def test_gateway_answers_requests_of_real_clients() -> None:
    """Offers of h2c, HTTP/1.0 and half-closed connections get whole answers."""
    await talk()


async def test_gateway_reads_requests_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HttpConnection.data_received

    def byte_by_byte(protocol: HttpConnection, data: bytes) -> None:
        for at in range(len(data)):
            whole(protocol, data[at : at + 1])

    monkeypatch.setattr(HttpConnection, "data_received", byte_by_byte)
    await talk()
