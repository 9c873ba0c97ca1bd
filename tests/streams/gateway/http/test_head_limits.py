"""What is too large: heads of requests, traces, and records that would follow from a call."""

import asyncio
import contextlib

import pytest

from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.raw_connection import address_of
from tests.streams.gateway.samples import chat

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


async def spoken(url: str, *parts: bytes) -> bytes:
    """What a server says to bytes, until it closes."""
    reader, writer = await asyncio.open_connection(*address_of(url))
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
async def test_gateway_returns_431_for_large_head(parts: tuple[bytes, ...]) -> None:
    """A header of megabytes must not reach a router."""
    async with serving(InProcessGateway(header_bytes_max=2_000, headers_max=8)) as url:
        answer = await spoken(url, *parts)
        assert b"HTTP/1.1 431" in answer
        assert b'"code":"headers_too_large"' in answer
        async with http_client(url) as client:
            assert (await client.get("/health/live")).status_code == 200


async def test_body_does_not_count_toward_head_limit() -> None:
    gateway = InProcessGateway(header_bytes_max=2_000)
    gateway.answer_with("ok")
    async with serving(gateway) as url, http_client(url) as client:
        for _ in range(2):
            response = await client.post(
                "/v1/chat/completions", json=chat("x" * 300, user="u" * 9000)
            )
            assert response.status_code == 200


async def test_end_of_long_body_does_not_count_toward_head_limit() -> None:
    """The last piece of a body must not end its connection."""
    async with serving(InProcessGateway(header_bytes_max=2_000)) as url, http_client(url) as client:
        for _ in range(6):
            response = await client.post("/v1/chat/completions", json=chat("x " * 150_000))
            assert response.json()["error"]["code"] == "context_length_exceeded"
