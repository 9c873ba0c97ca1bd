"""The load of the comparison with vLLM's serving, without engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from infra.bench.serving.proxies import aiohttp_app
from infra.bench.serving.sim_server import listening
from infra.bench.vllm.closed_loop import TOKENS, ConversationStreams, LoadCell
from infra.bench.vllm.main import (
    equal_answers,
)
from infra.broker.probe import free_ports

HOST = "127.0.0.1"


SMALL = LoadCell(streams=2, prompt_tokens=5, turns=2, window_s=0.3)


@asynccontextmanager
async def server(bodies: list[dict[str, Any]]) -> AsyncIterator[str]:
    """Answers every chat with TOKENS tokens, two to an event."""

    async def chat(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(0, TOKENS, 2):
            choice = {"delta": {"content": " a b"}, "token_ids": [number, number + 1]}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    (port,) = free_ports(HOST)
    async with listening(app, port):
        yield f"http://{HOST}:{port}"


async def enough(url: str) -> dict[str, Any]:
    """Of a window in which both streams came to their second conversation."""
    while True:
        figures = await ConversationStreams(url, "model", SMALL, ["one", "two"], "1").measure()
        if figures["answers"] > 5:
            return figures


async def test_streams_converse_and_count_answers() -> None:
    bodies: list[dict[str, Any]] = []
    async with server(bodies) as url:
        first, second = await enough(url), await enough(url)
    assert first["errors"] == {}
    assert first["answers"] > 2
    max_answers = first["answers"] + SMALL.streams  # what is given up counts in part
    assert 0 < first["requests_per_s"] <= max_answers / SMALL.window_s
    assert {len(body["messages"]) for body in bodies} == {1, 3}
    assert all(body["max_tokens"] == TOKENS and body["ignore_eos"] for body in bodies)
    assert set(first["said"]) & set(second["said"])  # the same seed asks the same
    assert equal_answers({"a": first["said"], "b": second["said"]})["a and b"]["equal"] > 2


async def test_proxy_distributes_whole_requests_in_turn() -> None:
    left_bodies: list[dict[str, Any]] = []
    right_bodies: list[dict[str, Any]] = []
    async with server(left_bodies) as first, server(right_bodies) as second:
        (port,) = free_ports(HOST)
        async with listening(aiohttp_app((), [first, second]), port):
            url = f"http://{HOST}:{port}"
            await ConversationStreams(url, "model", SMALL, ["one", "two"], "1").measure()
    assert abs(len(left_bodies) - len(right_bodies)) <= 1
    assert not any("kv_transfer_params" in body for body in left_bodies + right_bodies)
