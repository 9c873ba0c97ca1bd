"""The simulated engine behind a plain HTTP server, in one process: a peer of the benchmark.

Streams OpenAI chat chunks. Also answers the two calls of a disaggregating proxy: a call with
`do_remote_decode` computes the prompt and returns the place of its KV, and a call with those
parameters decodes from it. Optimised, because Trivium is compared with it: aiohttp on uvloop,
chunks built from prepared bytes, one write per stream and engine step.
"""

import asyncio
import base64
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import uvloop
from aiohttp import web

from schemas.codec import to_dict
from schemas.records import KvHandle, Sampling, WorkPhase
from schemas.sections import build
from schemas.settings import ModelSettings
from streams.calls.request.chat import Chat
from streams.calls.request.tokenizer import Tokenizer
from streams.log.clock import wall_ms
from workers.llm.engine import Engine, Job, Output
from workers.llm.sim.engine import start
from workers.llm.sim.settings import SimSettings

_DEADLINE_MS = 120_000
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class SimServer:
    """An engine, and the streams that wait for its tokens."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._numbers = itertools.count()
        self._queues: dict[str, asyncio.Queue[Output]] = {}

    async def pump(self) -> None:
        """Pass the outputs of each engine step to their streams."""
        while True:
            for output in await self._engine.outputs():
                queue = self._queues.get(output.request_id)
                if queue is not None:
                    queue.put_nowait(output)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a call of `POST /v1/chat/completions`."""
        body = orjson.loads(await request.read())
        text = self._tokenizer.render(Chat(messages=body["messages"]))
        tokens = await self._tokenizer.encode(text, add_special_tokens=False)
        params = body.get("kv_transfer_params") or {}
        prefill = bool(params.get("do_remote_decode"))
        job = Job(
            request_id=f"chatcmpl-{next(self._numbers)}",
            phase=WorkPhase.PREFILL if prefill else WorkPhase.DECODE,
            prompt_tokens=tokens,
            sampling=_sampling(body, tokens_min=2 if prefill else 1),
            deadline_ms=wall_ms() + _DEADLINE_MS,
            kv=_unpack(params["handle"]) if params.get("do_remote_prefill") else None,
        )
        queue = self._queues[job.request_id] = asyncio.Queue()
        self._engine.add(job)
        try:
            if prefill:
                return await self._handed_over(queue)
            return await self._stream(request, job.request_id, queue)
        except BaseException:
            self._engine.abort(job.request_id)
            raise
        finally:
            del self._queues[job.request_id]

    async def _handed_over(self, queue: "asyncio.Queue[Output]") -> web.Response:
        output = await queue.get()
        while output.kv is None:
            if output.finish_reason:
                return web.json_response({"error": {"message": str(output.error)}}, status=500)
            output = await queue.get()
        params = {"do_remote_prefill": True, "do_remote_decode": False, "handle": _pack(output.kv)}
        message = {"role": "assistant", "content": output.text}
        choices = [{"index": 0, "message": message, "finish_reason": "length"}]
        return web.json_response({"choices": choices, "kv_transfer_params": params})

    async def _stream(
        self, request: web.Request, request_id: str, queue: "asyncio.Queue[Output]"
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._model,
        }
        opening = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":0,"delta":'
        first = opening + b'{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
        has_ended = False
        while not has_ended:
            outputs = [await queue.get()]
            while not queue.empty():
                outputs.append(queue.get_nowait())
            chunks = [first]
            first = b""
            for output in outputs:
                reason = orjson.dumps(output.finish_reason or None)
                has_ended = bool(output.finish_reason)
                chunks.append(opening + b'{"content":' + orjson.dumps(output.text))
                chunks.append(b'},"finish_reason":' + reason + b"}]}\n\n")
            if has_ended:
                chunks.append(_DONE)
            await response.write(b"".join(chunks))
        await response.write_eof()
        return response


def _sampling(body: Mapping[str, Any], *, tokens_min: int) -> Sampling:
    """Return the sampling of a call, with at least `tokens_min` tokens. A prefill call asks for
    one token, and the engine hands no KV over for an answer of one token."""
    return Sampling(
        max_tokens=max(int(body.get("max_tokens", 16)), tokens_min),
        temperature=float(body.get("temperature", 1.0)),
        seed=body.get("seed", 0),
    )


def _pack(kv: KvHandle) -> dict[str, Any]:
    return {**to_dict(kv), "params": base64.b64encode(kv.params).decode()}


def _unpack(packed: Mapping[str, Any]) -> KvHandle:
    return dataclasses.replace(KvHandle(**packed), params=base64.b64decode(packed["params"]))


async def serve(port: int, model_folder: Path, settings: SimSettings) -> None:
    """Serve simulated chats on this port until cancelled."""
    model = ModelSettings(path=str(model_folder), name="sim")
    engine = await start(
        settings, model=model, engine_id=f"sim-{port}", worker_id="sim-0", worker_epoch=1
    )
    server = SimServer(engine, Tokenizer(model_folder), "sim")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    try:
        async with listening(app, port):
            await server.pump()
    finally:
        await engine.close()


@asynccontextmanager
async def listening(app: web.Application, port: int) -> AsyncIterator[None]:
    """Serve the application on the loopback interface."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=2_048).start()
        yield
    finally:
        await runner.cleanup()


def run(port: int, model_folder: str, sim: str) -> None:
    """Run the server in this process; `sim` is the section [sim] as JSON."""
    settings = build("sim", SimSettings, orjson.loads(sim))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(port, Path(model_folder), settings))


if __name__ == "__main__":
    import sys

    run(int(sys.argv[1]), sys.argv[2], sys.argv[3])
