"""Bodies: read within bounds, each and all of them together."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import uvloop

from tests.streams.gateway.in_process import InProcessGateway, call, serving
from tests.streams.gateway.samples import chat
from tests.waits import PATIENCE_S

JSON = {"content-type": "application/json"}
CHATS = "/v1/chat/completions"


async def test_gateway_returns_413_for_large_body_with_and_without_length() -> None:
    gateway = InProcessGateway(body_bytes_max=100)

    async def pieces() -> Any:
        for _ in range(10):
            yield b" " * 20

    async with gateway.client() as client:
        announced = await client.post("/v1/chat/completions", content=b" " * 101, headers=JSON)
        chunked = await client.post("/v1/chat/completions", content=pieces(), headers=JSON)
        tokenize = await client.post("/tokenize", content=b" " * 101, headers=JSON)
    for response in (announced, chunked, tokenize):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


async def test_gateway_bounds_bodies_in_flight_together() -> None:
    """The bound applies before a call is admitted."""
    gateway = InProcessGateway(bodies_bytes_max=1_000)
    half = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b" " * 900
        half.set()
        await release.wait()
        yield json.dumps(chat()).encode()

    release = asyncio.Event()
    headers = {"content-type": "application/json"}
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post(CHATS, content=slowly(), headers=headers))
        await half.wait()
        refused = await client.post(CHATS, content=b" " * 200, headers=headers)
        assert refused.status_code == 429
        assert "900 of your bytes of bodies" in refused.json()["error"]["message"]
        gateway.answer_with("ok")
        release.set()
        assert (await first).status_code == 200
    assert (await call(gateway, b" " * 900 + json.dumps(chat()).encode()))[0] == 200, (
        "what was read is given back"
    )


async def test_spellings_of_one_api_key_share_one_limit() -> None:
    """Each spelling of the header must not have a share of its own."""
    gateway = InProcessGateway(bodies_bytes_max=1_000, api_keys=("one", "two"))
    half = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b" " * 400
        half.set()
        await release.wait()

    async def refused(authorization: str) -> bool:
        headers = {**JSON, "authorization": authorization}
        response = await client.post("/v1/embeddings", content=b" " * 300, headers=headers)
        return response.status_code == 429

    release = asyncio.Event()
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        headers = {**JSON, "authorization": "Bearer one"}
        first = tasks.create_task(client.post("/tokenize", content=slowly(), headers=headers))
        await half.wait()
        assert [await refused(f"{name} one") for name in ("Bearer", "bearer", "Bearer ")] == [
            *(True, True, True)
        ]
        assert not await refused("Bearer two")
        release.set()
        assert (await first).status_code == 400


async def test_client_reads_413_and_keeps_connection() -> None:
    """The gateway discards the rest of the body instead of closing the connection."""
    gateway = InProcessGateway(body_bytes_max=1_000)
    gateway.answer_with("ok")
    async with (
        serving(gateway) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        for size, expected in ((10, 200), (8 << 20, 413), (10, 200)):
            response = await client.post(CHATS, json=chat("x" * size, max_tokens=1))
            assert response.status_code == expected


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_closing_client_reads_413(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """`urllib` sends `Connection: close`, and must not see a reset."""

    def post(url: str) -> int:
        call = urllib.request.Request(url + CHATS, b"x" * (8 << 20), JSON)
        try:
            with urllib.request.urlopen(call, timeout=PATIENCE_S) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            assert json.load(error)["error"]["code"] == "body_too_large"
            return error.code

    async def run() -> None:
        async with serving(InProcessGateway(body_bytes_max=1_000)) as url:
            assert await asyncio.to_thread(post, url) == 413

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())
