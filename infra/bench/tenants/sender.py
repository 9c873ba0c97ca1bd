"""Sends the calls of one tenant, and repeats them."""

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from workers.models.sim import SIM_MODEL

CHAT, _BATCH = "/v1/chat/completions", "batch"
_TIMEOUT_S, _PAUSE_S = 60.0, 2.0
_WORDS = "the harbour light is green and the quay is long while ships wait for water ".split()
_HANGS_UP_S = 0.5
Deed = Callable[["TenantClient"], Awaitable[Any]]


class TenantClient:
    """Sends the calls of one tenant, each to any gateway."""

    def __init__(self, urls: Sequence[str], key: str, rng: random.Random) -> None:
        self._urls, self._key, self.rng = urls, key, rng
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S
        )

    async def post(self, path: str, **call: Any) -> httpx.Response:
        """Send one POST call to any gateway."""
        return await self._client.post(self.rng.choice(self._urls) + path, **call)

    async def get(self, path: str) -> Any:
        """Return the JSON of a GET call; raises HTTPStatusError."""
        answer = await self._client.get(self.rng.choice(self._urls) + path)
        return answer.raise_for_status().json()

    async def chat(self, text: str, **fields: Any) -> httpx.Response:
        """Ask for a short chat answer."""
        messages = [{"role": "user", "content": text}]
        return await self.post(CHAT, json={"messages": messages, "max_tokens": 8, **fields})

    async def upload(self, name: str, data: bytes, purpose: str = "assistants") -> str:
        """Upload a file and return its id."""
        answer = await self.post(
            "/v1/files", files={"file": (name, data)}, data={"purpose": purpose}
        )
        return str(answer.raise_for_status().json()["id"])

    async def store(self, name: str, data: bytes) -> str:
        """Add a file to a new vector store and return the path of its content."""
        store = (await self.post("/v1/vector_stores", json={})).raise_for_status().json()["id"]
        file_id = await self.upload(name, data)
        path = f"/v1/vector_stores/{store}/files"
        (await self.post(path, json={"file_id": file_id})).raise_for_status()
        return f"{path}/{file_id}/content"

    async def batch(self, texts: Sequence[str]) -> str:
        """Create a batch of these texts and return its path."""
        bodies = [
            {
                "model": SIM_MODEL,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 4,
            }
            for text in texts
        ]
        lines = [
            {"custom_id": str(n), "method": "POST", "url": CHAT, "body": body}
            for n, body in enumerate(bodies)
        ]
        file_id = await self.upload("b.jsonl", "\n".join(map(json.dumps, lines)).encode(), _BATCH)
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        answer = (await self.post("/v1/batches", json=body)).raise_for_status()
        return f"/v1/batches/{answer.json()['id']}"

    async def hang_up(self, method: str, path: str, **call: Any) -> None:
        """Send a call and disconnect after `_HANGS_UP_S` if it has no answer."""
        try:
            async with asyncio.timeout(_HANGS_UP_S):
                await self._client.request(method, self.rng.choice(self._urls) + path, **call)
        except TimeoutError:
            pass

    async def raw(self, head: str, pieces: Sequence[bytes], seconds: float) -> str:
        """Send raw bytes over `seconds`, and return the first line of the answer."""
        url = httpx.URL(self.rng.choice(self._urls))
        reader, writer = await asyncio.open_connection(url.host, url.port)
        host = f"Host: {url.host}:{url.port}\r\nAuthorization: Bearer {self._key}\r\n"
        try:
            writer.write(f"{head}\r\n{host}".encode())
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(seconds / len(pieces))
            async with asyncio.timeout(_HANGS_UP_S):
                return (await reader.readline()).decode().strip()
        except TimeoutError:
            return "no answer"
        finally:
            writer.close()

    def text(self, chars: int) -> str:
        """Return random words of about `chars` characters."""
        return " ".join(self.rng.choices(_WORDS, k=chars // 5))

    async def close(self) -> None:
        """Close the connections of this tenant."""
        await self._client.aclose()


class Tenant(ABC):
    """A tenant that repeats all its deeds at the same time, until `is_over` or until `run` is
    cancelled."""

    def __init__(self, urls: Sequence[str], key: str, seed: int, deeds: Sequence[Deed]) -> None:
        self._urls, self._key, self._seed, self._deeds = urls, key, seed, deeds
        self.is_over = False

    async def run(self) -> None:
        """Repeat all deeds at the same time until each ends."""
        async with asyncio.TaskGroup() as group:
            for deed in self._deeds:
                group.create_task(self._repeat(deed))

    async def _repeat(self, deed: Deed) -> None:
        name = deed.__name__
        sender = TenantClient(self._urls, self._key, random.Random(f"{self._seed} {name}"))
        try:
            while not self.is_over:
                await self._do(name, deed, sender)
                await asyncio.sleep(_PAUSE_S)
        finally:
            await sender.close()

    @abstractmethod
    async def _do(self, name: str, deed: Deed, sender: TenantClient) -> None:
        """Do the deed once, and record its result."""
