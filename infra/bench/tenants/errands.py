"""Sends the errands of a well-behaved tenant and measures their durations.

The errands are a small file to index and find, a batch of one line, an answer by a JSON schema, and
embeddings. All kinds run at the same time, each with a pause before it repeats. An errand is
retried if a connection breaks or a gateway is down. Any other refusal makes it fail, and so does
`PATIENCE_S`. The durations of the successful ones are recorded.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from infra.bench.tenants.sender import Deed, Tenant, TenantClient
from schemas.errors import NotReady

PATIENCE_S = 120.0
_LOOK_S, _AGAIN_S = 0.1, 0.5
_TEXT = b"The harbour master is Ilse Brandt."
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
Errand = Callable[[TenantClient], Awaitable[None]]


async def small_file(sender: TenantClient) -> None:
    """Store a small file and wait until a search finds it."""
    path = await sender.store("a.txt", _TEXT)
    store = path.partition("/files/")[0]
    await _until_completed(sender, path.removesuffix("/content"))
    answer = await sender.post(f"{store}/search", json={"query": "Ilse Brandt"})
    if not answer.raise_for_status().json()["data"]:
        raise NotReady(f"{store}: completed, and not found")


async def small_batch(sender: TenantClient) -> None:
    """Run a batch of one line and wait for its end."""
    await _until_completed(sender, await sender.batch(["Hello"]))


async def form(sender: TenantClient) -> None:
    """Ask for an answer by a schema that no call has used before."""
    schema = {**_SCHEMA, "title": str(sender.rng.random())}
    response_format = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    answer = await sender.chat("Hello", response_format=response_format, max_tokens=64)
    answer.raise_for_status()


async def vectors(sender: TenantClient) -> None:
    """Ask for the embeddings of two texts."""
    (await sender.post("/v1/embeddings", json={"input": ["quay", "ship"]})).raise_for_status()


async def _until_completed(sender: TenantClient, path: str) -> None:
    while (status := (await sender.get(path))["status"]) != "completed":
        if status not in ("validating", "in_progress", "finalizing"):
            raise NotReady(f"{path}: {status}")
        await asyncio.sleep(_LOOK_S)


ERRANDS: Sequence[Errand] = (small_file, small_batch, form, vectors)


class Errands(Tenant):
    """Repeats errands until `is_over` and records their durations in s."""

    def __init__(self, urls: Sequence[str], key: str, seed: int) -> None:
        super().__init__(urls, key, seed, ERRANDS)
        self.seconds: dict[str, list[float]] = defaultdict(list)  # by errand
        self.failed: list[str] = []

    async def _do(self, name: str, deed: Deed, sender: TenantClient) -> None:
        began_s = time.monotonic()
        why = await self._attempt(deed, sender)
        if why:
            self.failed.append(f"{name}: {why}")
        else:
            self.seconds[name].append(time.monotonic() - began_s)

    async def _attempt(self, errand: Deed, sender: TenantClient) -> str:
        """Try an errand and return why it failed; empty if it succeeded."""
        why: Any = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await errand(sender)
                        return ""
                    except httpx.HTTPStatusError as error:
                        why = f"{error.response.status_code} {error.response.text[:200]}"
                        if not error.response.is_server_error:
                            return str(why)
                    except httpx.TransportError as error:
                        why = type(error).__name__
                    except NotReady as error:
                        return str(error)
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            return f"not done after {PATIENCE_S:.0f} s; {why}"
