"""Proxies that the benchmarks compare Trivium with, modelled on vLLM's toy proxy.

For each request a proxy calls a prefill server, which returns one token and the place of the KV,
and then streams a call to a decode server and passes its bytes on. Like the toy proxy, they use
round robin, no retries, no limits and no time-outs. `httpx` is the usual set-up (FastAPI, httpx,
uvicorn with uvloop and httptools); `aiohttp` does the same with aiohttp and uvloop. `robin` sends
whole requests to the servers in turn. Written for these benchmarks.
"""

import asyncio
import itertools
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import uvicorn
import uvloop
from aiohttp import web
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from infra.bench.serving.sim_server import listening

PATH = "/v1/chat/completions"
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the first call: the same request for one token, not streamed."""
    first = {**body, "kv_transfer_params": _REMOTE_DECODE, "stream": False, "max_tokens": 1}
    first.pop("stream_options", None)
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    return first


def httpx_app(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> FastAPI:
    """Return a proxy with a FastAPI server and httpx clients."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        pools = [
            [httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in urls]
            for urls in (prefill_urls, decode_urls)
        ]
        app.state.prefill, app.state.decode = (itertools.cycle(pool) for pool in pools)
        yield
        for client in itertools.chain.from_iterable(pools):
            await client.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.post(PATH)
    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        prefill: httpx.AsyncClient = next(app.state.prefill)
        response = await prefill.post(PATH, json=prefill_body(body), headers=headers)
        response.raise_for_status()
        body["kv_transfer_params"] = response.json()["kv_transfer_params"]
        decode: httpx.AsyncClient = next(app.state.decode)

        async def generate() -> AsyncIterator[bytes]:
            async with decode.stream("POST", PATH, json=body, headers=headers) as streamed:
                streamed.raise_for_status()
                async for chunk in streamed.aiter_bytes():
                    yield chunk

        return StreamingResponse(generate(), media_type="text/event-stream")

    return app


def aiohttp_app(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> web.Application:
    """Return a proxy on aiohttp; without prefill servers it passes calls to decode servers."""
    prefill, decode = itertools.cycle(prefill_urls), itertools.cycle(decode_urls)
    session_key = web.AppKey("session", aiohttp.ClientSession)

    async def session(app: web.Application) -> AsyncIterator[None]:
        unlimited = aiohttp.TCPConnector(limit=0)
        no_timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=unlimited, timeout=no_timeout) as client:
            app[session_key] = client
            yield

    async def chat(request: web.Request) -> web.StreamResponse:
        client = request.app[session_key]
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        if prefill_urls:
            url = next(prefill) + PATH
            async with client.post(url, json=prefill_body(body), headers=headers) as response:
                response.raise_for_status()
                body["kv_transfer_params"] = (await response.json())["kv_transfer_params"]
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with client.post(next(decode) + PATH, json=body, headers=headers) as streamed:
            streamed.raise_for_status()
            await out.prepare(request)
            async for chunk in streamed.content.iter_any():
                await out.write(chunk)
        await out.write_eof()
        return out

    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_post(PATH, chat)
    return app


def run(kind: str, port: int, prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> None:
    """Run the proxy in this process; `kind` is httpx, aiohttp or robin."""
    if kind == "httpx":
        app = httpx_app(prefill_urls, decode_urls)
        uvicorn.run(
            app,
            host="127.0.0.1",
            port=port,
            loop="uvloop",
            http="httptools",
            access_log=False,
            log_level="warning",
            backlog=2_048,
        )
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        first = () if kind == "robin" else prefill_urls
        runner.run(_serve(aiohttp_app(first, decode_urls), port))


async def _serve(app: web.Application, port: int) -> None:
    async with listening(app, port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(","))
