"""Runs one batch over HTTP while processes die: uploads its file and fetches the results.

The bridges answer its lines as they answer prompts (topics `batch.prompts`, `batch.answers`).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from infra.bench.platform.questions import LoadQuestion
from schemas.errors import NotReady

_LOOK_S, _PAUSE_S, _PATIENCE_S = 1.0, 0.5, 3_600.0
_ENDED = ("completed", "failed", "expired", "cancelled")
_TRY = aiohttp.ClientTimeout(total=300, connect=5)
Content = TypeVar("Content")


class BatchLoad:
    """One batch. `files` has the paths of its files `input`, `output` and `errors`."""

    def __init__(self, urls: Sequence[str], model: str, folder: Path) -> None:
        self._urls, self._model = urls, model
        self.files = {
            name: str(folder / f"batch-{name}.jsonl") for name in ("input", "output", "errors")
        }
        self.status: dict[str, Any] = {}
        self.began_s = self.ended_s = 0.0

    async def create(self, questions: Iterable[LoadQuestion]) -> None:
        """Upload the input file and create the batch; raises NotReady."""
        self._write_lines(questions)
        file = await self._json("POST", "/v1/files", data=self._form)
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        self.began_s = time.monotonic()
        self.status = await self._json("POST", "/v1/batches", json=lambda: body)

    def _write_lines(self, questions: Iterable[LoadQuestion]) -> None:
        lines = (json.dumps(question.line(self._model)) for question in questions)
        Path(self.files["input"]).write_text("\n".join(lines) + "\n")

    def _form(self) -> aiohttp.FormData:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", Path(self.files["input"]).read_bytes(), filename="batch.jsonl")
        return form

    async def wait(self, on_progress: Callable[[int], None]) -> None:
        """Wait until the batch has ended, then write its results to files; raises NotReady."""
        end_s = time.monotonic() + _PATIENCE_S
        while self.status["status"] not in _ENDED:
            if time.monotonic() > end_s:
                raise NotReady(f"the batch has not ended in {_PATIENCE_S} s: {self.status}")
            await asyncio.sleep(_LOOK_S)
            self.status = await self._json("GET", f"/v1/batches/{self.status['id']}")
            counts = self.status.get("request_counts") or {}
            on_progress(counts.get("completed", 0) + counts.get("failed", 0))
        self.ended_s = time.monotonic()
        for name, field in (("output", "output_file_id"), ("errors", "error_file_id")):
            file_id = self.status.get(field)
            content = await self._content(file_id) if file_id else b""
            await asyncio.to_thread(Path(self.files[name]).write_bytes, content)

    async def _content(self, file_id: str) -> bytes:
        return await self._request(
            "GET", f"/v1/files/{file_id}/content", aiohttp.ClientResponse.read
        )

    async def _json(self, method: str, path: str, **makes: Callable[[], Any]) -> dict[str, Any]:
        return await self._request(method, path, aiohttp.ClientResponse.json, **makes)

    async def _request(
        self,
        method: str,
        path: str,
        reads: Callable[[aiohttp.ClientResponse], Awaitable[Content]],
        **makes: Callable[[], Any],
    ) -> Content:
        """Call the gateways in turn until one answers; raises NotReady if one refuses."""
        why, end_s, number = "", time.monotonic() + 120.0, 0
        async with aiohttp.ClientSession(timeout=_TRY) as session:
            while time.monotonic() < end_s:
                url = self._urls[number % len(self._urls)] + path
                arguments = {name: make() for name, make in makes.items()}
                try:
                    async with session.request(method, url, **arguments) as response:
                        if response.status == 200:
                            return await reads(response)
                        why = f"{response.status}: {(await response.text())[:300]}"
                        if response.status in (400, 401, 413, 422):
                            break
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                number += 1
                await asyncio.sleep(_PAUSE_S)
        raise NotReady(f"{method} {path}: {why}")
