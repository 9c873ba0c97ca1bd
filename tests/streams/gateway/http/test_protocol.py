"""What is too large: heads of requests, traces, and records that would follow from a call."""

import asyncio
import contextlib

import pytest

from schemas.rules.sizes import REQUEST_BYTES_MAX
from tests.schemas.examples import TRACEPARENT
from tests.streams.gateway.in_process import InProcessGateway, call, http_client, serving
from tests.streams.gateway.samples import chat, completion


async def spoken(url: str, *parts: bytes) -> bytes:
    """What a server says to bytes, until it closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD, b"a: " + b"x" * 3_000 + b"\r\n\r\n"),
        (HEAD, b"".join(b"a%d: x\r\n" % i for i in range(9)) + b"\r\n"),
        (HEAD, b"a: " + b"x" * 1_500, b"x" * 1_500),
        (b"GET /" + b"x" * 3_000 + b" HTTP/1.1\r\n\r\n",),
    ],
    ids=["long", "many", "endless", "path"],
)
async def test_heads_of_requests_are_bounded(parts: tuple[bytes, ...]) -> None:
    """A header of megabytes went to routers as it was (issue 10, 15)."""
    async with serving(InProcessGateway(header_bytes_max=2_000, headers_max=8)) as url:
        answer = await spoken(url, *parts)
        assert b"HTTP/1.1 431" in answer
        assert b'"code":"headers_too_large"' in answer
        async with http_client(url) as client:
            assert (await client.get("/health/live")).status_code == 200


async def test_bodies_do_not_count_as_heads() -> None:
    gateway = InProcessGateway(header_bytes_max=2_000)
    gateway.answer_with("ok")
    async with serving(gateway) as url, http_client(url) as client:
        for _ in range(2):
            response = await client.post(
                "/v1/chat/completions", json=chat("x" * 300, user="u" * 9000)
            )
            assert response.status_code == 200


async def test_the_end_of_a_long_body_does_not_count_as_a_head() -> None:
    """It comes in pieces of its own; the last one ended its connection (issue 10, 15)."""
    async with serving(InProcessGateway(header_bytes_max=2_000)) as url, http_client(url) as client:
        for _ in range(6):
            response = await client.post("/v1/chat/completions", json=chat("x " * 150_000))
            assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "value", [b"t", TRACEPARENT[:-1], b"f" * 4_000], ids=["t", "short", "long"]
)
async def test_only_traces_of_w3c_s_form_travel(value: bytes) -> None:
    """Nothing that a client writes there reaches a record unread (issue 10, 15)."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    for trace in (value, TRACEPARENT):
        assert (await call(gateway, chat(), traceparent=trace.decode()))[0] == 200
    assert gateway.log.headers[0] == []
    assert gateway.log.headers[1] == [("traceparent", TRACEPARENT)]


async def test_a_request_whose_work_would_be_too_large_is_the_callers_413() -> None:
    """Too large is nobody else's trouble (issue 10, 15 and 17)."""
    gateway = InProcessGateway(max_model_len=4 << 20, body_bytes_max=64 << 20)
    gateway.answer_with("ok")
    prompt = [7] * (REQUEST_BYTES_MAX // 4)
    status, answer = await call(gateway, completion(prompt), "/v1/completions")
    assert (status, answer["error"]["code"]) == (413, "record_too_large")
    assert "shorten the prompt" in answer["error"]["message"]
    assert (await call(gateway, completion(prompt[:-1_000]), "/v1/completions"))[0] == 200
