"""Clients over HTTP ask until they are answered, and note what they were told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from infra.bench.platform.loads import BatchLoad, HttpLoad, TtftProbes
from infra.bench.platform.questions import draw_questions
from infra.bench.serving.sim_server import listening
from infra.broker.probe import free_ports
from tests.waits import until

HOST = "127.0.0.1"


@asynccontextmanager
async def gateway(refused: int) -> AsyncIterator[str]:
    """Refuses so many calls, then answers; batches are done when they are looked at twice."""
    refusals_left, looks = refused, 0

    async def chat(request: web.Request) -> web.StreamResponse:
        nonlocal refusals_left
        refusals_left -= 1
        if refusals_left >= 0:
            return web.Response(status=503)
        body = await request.json()
        if not body.get("stream"):
            usage = {"prompt_tokens": 7, "completion_tokens": 2}
            return web.json_response({"id": "chatcmpl-r1", "usage": usage})
        response = web.StreamResponse()
        await response.prepare(request)
        for content in ("", "one"):
            event = json.dumps({"choices": [{"delta": {"content": content}}]})
            await response.write(f"data: {event}\n\n".encode())
        return response

    async def upload(request: web.Request) -> web.Response:
        nonlocal refusals_left
        refusals_left -= 1
        form = await request.post()
        assert form["purpose"] == "batch"
        return (
            web.Response(status=503) if refusals_left >= 0 else web.json_response({"id": "file-1"})
        )

    async def create(_: web.Request) -> web.Response:
        return web.json_response({"id": "batch_1", "status": "validating"})

    async def look(_: web.Request) -> web.Response:
        nonlocal looks
        looks += 1
        status = "completed" if looks > 1 else "in_progress"
        counts = {"completed": looks, "failed": 0}
        batch = {"id": "batch_1", "status": status, "request_counts": counts}
        return web.json_response({**batch, "output_file_id": "file-2", "error_file_id": None})

    async def content(_: web.Request) -> web.Response:
        return web.Response(text='{"custom_id": "line-0"}\n')

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/files", upload)
    app.router.add_post("/v1/batches", create)
    app.router.add_get("/v1/batches/batch_1", look)
    app.router.add_get("/v1/files/file-2/content", content)
    (port,) = free_ports(HOST)
    async with listening(app, port):
        yield f"http://{HOST}:{port}"


async def test_http_load_repeats_question_until_answered(tmp_path: Path) -> None:
    progress: list[int] = []
    async with gateway(refused=2) as url:
        (nowhere,) = free_ports(HOST)
        load = HttpLoad([url, f"http://{HOST}:{nowhere}"], "sim", 2, tmp_path / "notes")
        await load.run(draw_questions(4, 1), progress.append)
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert sorted(note.pop("number") for note in notes) == [0, 1, 2, 3]
    assert notes == [{"request_id": "r1", "prompt_tokens": 7, "completion_tokens": 2}] * 4
    assert progress == [1, 2, 3, 4] and load.tries["status 503"] == 2
    assert load.tries["ClientConnectorError"] >= 1


async def test_ttft_probe_waits_through_outage() -> None:
    async with gateway(refused=1) as url:
        probes = TtftProbes([url], "sim", 50.0, 1)
        running = asyncio.create_task(probes.run())
        await until(lambda: len(probes.ttft_ms) > 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert probes.failed == 0 and min(probes.ttft_ms) > 0


async def test_batch_load_uploads_waits_and_fetches_results(tmp_path: Path) -> None:
    progress: list[int] = []
    async with gateway(refused=1) as url:
        load = BatchLoad([url], "sim", tmp_path)
        await load.create(draw_questions(3, 1))
        await load.wait(progress.append)
    lines: list[Any] = [json.loads(e) for e in Path(load.files["input"]).read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["line-0", "line-1", "line-2"]
    assert Path(load.files["output"]).read_text() == '{"custom_id": "line-0"}\n'
    assert Path(load.files["errors"]).read_text() == ""
    assert progress == [1, 2] and load.status["status"] == "completed"
