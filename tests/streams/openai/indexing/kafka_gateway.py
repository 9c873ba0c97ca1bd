"""Whole gateways in this process on a real broker, with an embedding and a retrieval worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai

from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.gateway import app
from streams.gateway.http.listener import listen
from tests.long_leases import long_leases
from tests.streams.gateway.samples import MODEL
from tests.streams.gateway.small_tokenizer import tokenizer_folder
from tests.waits import PATIENCE_S, until
from tests.workers.embed.bookshelf import worker as embedder
from tests.workers.retrieval.retrieval_workers import worker as searcher
from workers.embed.settings import EmbeddingSettings

KEYS = ("one", "two")


class Running:
    """One gateway."""

    def __init__(self, url: str, stop: asyncio.Event, task: "asyncio.Task[None]") -> None:
        self.url, self._stop, self._task = url, stop, task

    def ai(self, key: str = KEYS[0]) -> openai.AsyncOpenAI:
        """A caller."""
        return openai.AsyncOpenAI(
            base_url=self.url + "/v1", api_key=key, timeout=PATIENCE_S, max_retries=0
        )

    async def end(self) -> None:
        """In an orderly way."""
        self._stop.set()
        await self._task

    async def die(self) -> None:
        """As if it were killed: it does nothing more."""
        self._task.cancel()
        await asyncio.wait([self._task])


@contextlib.asynccontextmanager
async def gateway(log: LogSettings, name: str, **settings: Any) -> AsyncIterator[Running]:
    """Ready to be called about files."""
    patient = {"api_keys": KEYS, "accept_ms": 60_000, "grace_ms": 0, "event_key": "k" * 32}
    limits = GatewaySettings(**{**patient, **settings, "port": _free_port()})
    model = ModelSettings(path=str(tokenizer_folder()), name=MODEL, max_model_len=256)
    stop = asyncio.Event()
    with long_leases():
        task = asyncio.create_task(
            app.run_gateway(log, limits, [model], gateway_id=name, stop=stop)
        )
        running = Running(f"http://127.0.0.1:{limits.port}", stop, task)
        try:
            await until(lambda: answers(running.url))
            yield running
        finally:
            if not task.done():
                await running.end()


def _free_port() -> int:
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def answers(url: str) -> bool:
    """Whether a gateway knows what was kept, and can write."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        try:
            headers = {"authorization": f"Bearer {KEYS[0]}"}
            if (await client.get(url + "/v1/files", headers=headers)).status_code != 200:
                return False
            return "cannot be written" not in (await client.get(url + "/health/ready")).text
        except httpx.TransportError:
            return False


@contextlib.asynccontextmanager
async def pools(log: LogSettings) -> AsyncIterator[None]:
    """What embeds, and what searches."""
    settings = EmbeddingSettings(chunk_tokens=100, model="hash", tokenizer="none")
    async with embedder(log, "e", settings=settings), searcher(log, "r"):
        yield
