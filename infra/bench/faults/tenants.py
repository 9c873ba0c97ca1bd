"""Two tenants: one sends what once took Trivium from all others, the other does its errands.

`MISDEEDS` and `ERRANDS` run beside each other, each with a pause before it is repeated. How a
misdeed ends is counted and means nothing. An errand is tried again where a connection breaks or a
gateway is away; any other refusal ends it, and so does `PATIENCE_S`. How long those took that ended
well is noted. Errands are a small file that is to be found, a batch of one line, an answer of a
certain form, and vectors.
"""

import asyncio
import base64
import gzip
import json
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from infra.bench.faults.target_stack import MODEL
from schemas.errors import NotReady

PATIENCE_S, PAUSE_S = 120.0, 2.0
_LOOK_S, _AGAIN_S = 0.1, 0.5
_TEXT = b"The harbour master is Ilse Brandt."
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TIMEOUT_S = 60.0
_CHAT, _BATCH = "/v1/chat/completions", "batch"
_WORDS = "the harbour light is green and the quay is long while ships wait for water ".split()
_HANGS_UP_S, _TRICKLES_S = 0.5, 20.0
_BOUNDARY = "part"
Errand = Callable[["Sender"], Awaitable[None]]
Misdeed = Callable[["Sender"], Awaitable[str]]  # returns how it ended
Deed = Callable[["Sender"], Awaitable[Any]]  # of either


class Sender:
    """One tenant's calls, each at any gateway."""

    def __init__(self, urls: Sequence[str], key: str, rng: random.Random) -> None:
        self._urls, self._key, self.rng = urls, key, rng
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S
        )

    async def post(self, path: str, **call: Any) -> httpx.Response:
        """One call."""
        return await self._client.post(self.rng.choice(self._urls) + path, **call)

    async def get(self, path: str) -> Any:
        """What it says; raises HTTPStatusError."""
        answer = await self._client.get(self.rng.choice(self._urls) + path)
        return answer.raise_for_status().json()

    async def chat(self, text: str, **fields: Any) -> httpx.Response:
        """A short answer."""
        messages = [{"role": "user", "content": text}]
        return await self.post(_CHAT, json={"messages": messages, "max_tokens": 8, **fields})

    async def upload(self, name: str, data: bytes, purpose: str = "assistants") -> str:
        """The file's id."""
        answer = await self.post(
            "/v1/files", files={"file": (name, data)}, data={"purpose": purpose}
        )
        return str(answer.raise_for_status().json()["id"])

    async def store(self, name: str, data: bytes) -> str:
        """Have a file indexed; the path of what it says."""
        store = (await self.post("/v1/vector_stores", json={})).raise_for_status().json()["id"]
        file_id = await self.upload(name, data)
        path = f"/v1/vector_stores/{store}/files"
        (await self.post(path, json={"file_id": file_id})).raise_for_status()
        return f"{path}/{file_id}/content"

    async def batch(self, texts: Sequence[str]) -> str:
        """The batch's path."""
        lines = [
            {"custom_id": str(n), "method": "POST", "url": _CHAT, "body": {
                "model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}}
            for n, text in enumerate(texts)
        ]  # fmt: skip
        file_id = await self.upload("b.jsonl", "\n".join(map(json.dumps, lines)).encode(), _BATCH)
        body = {"input_file_id": file_id, "endpoint": _CHAT, "completion_window": "24h"}
        answer = (await self.post("/v1/batches", json=body)).raise_for_status()
        return f"/v1/batches/{answer.json()['id']}"

    async def hang_up(self, method: str, path: str, **call: Any) -> None:
        """A call whose answer nobody waits for."""
        try:
            async with asyncio.timeout(_HANGS_UP_S):
                await self._client.request(method, self.rng.choice(self._urls) + path, **call)
        except TimeoutError:
            pass

    async def raw(self, head: str, pieces: Sequence[bytes], seconds: float) -> str:
        """Bytes as they are, over so long; the first line of an answer."""
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
        """Words."""
        return " ".join(self.rng.choices(_WORDS, k=chars // 5))

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


async def one_long_word(sender: Sender) -> str:
    """500 kB without a space, which embedding workers read."""
    await sender.store("word.txt", base64.b64encode(sender.rng.randbytes(375_000)))
    return "stored"


async def deep_page(sender: Sender) -> str:
    """80 kB of HTML in elements in elements, and callers who ask what it says and hang up."""
    path = await sender.store("deep.html", b"<b>a" * 20_000)
    await asyncio.gather(*(sender.hang_up("GET", path) for _ in range(34)))
    return "hung up"


async def many_documents(sender: Sender) -> str:
    """20 000 documents in 469 kB."""
    await sender.store("m.jsonl", b"\n".join(b'{"id":"%d","text":"a"}' % n for n in range(20_000)))
    return "stored"


async def large_batch(sender: Sender) -> str:
    """1 000 lines, and what is left of them is cancelled."""
    path = await sender.batch([f"{n} {sender.rng.random()}" for n in range(1_000)])
    await asyncio.sleep(_TRICKLES_S)
    return str((await sender.post(f"{path}/cancel")).status_code)


async def long_lines(sender: Sender) -> str:
    """Lines of 33 kB, and some of 264 kB."""
    await sender.batch([sender.text(33_000) for _ in range(16)] + [sender.text(264_000)] * 4)
    return "sent"


async def slow_patterns(sender: Sender) -> str:
    """34 patterns at once that take long to check."""
    parts = "".join(f"[\\u0000-\\uffff]{{{number}}}" for number in range(100, 120))
    pattern = f"(?i){parts}{sender.rng.random()}"
    calls = (sender.chat("a", structured_outputs={"regex": pattern}) for _ in range(34))
    return _statuses(await asyncio.gather(*calls))


async def trailers(sender: Sender) -> str:
    """A megabyte of headers behind a body."""
    head = b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    return await sender.raw("GET /v1/models HTTP/1.1", [head, *[b"X: y\r\n" * 5_000] * 35], 1.0)


async def slow_forms(sender: Sender) -> str:
    """Eight uploads that hardly come."""
    head = (
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\nContent-Length: 100000\r\n\r\n"
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    ).encode()
    pieces = [head, *[b"a"] * 20]
    forms = (sender.raw("POST /v1/files HTTP/1.1", pieces, _TRICKLES_S) for _ in range(8))
    return " ".join(sorted(set(await asyncio.gather(*forms))))


async def large_upload(sender: Sender) -> str:
    """16 MiB, which are kept."""
    await sender.upload("a.bin", bytes(16 << 20))
    return "kept"


async def packed_body(sender: Sender) -> str:
    """A gigabyte in a megabyte."""
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    packed = await asyncio.to_thread(gzip.compress, bytes(1 << 26), 1)
    return str((await sender.post(_CHAT, content=packed * 16, headers=headers)).status_code)


async def long_chats(sender: Sender) -> str:
    """Prompts of 33 kB that nobody waits for."""
    body = {"messages": [{"role": "user", "content": sender.text(33_000)}], "max_tokens": 256}
    await asyncio.gather(*(sender.hang_up("POST", _CHAT, json=body) for _ in range(8)))
    return "hung up"


async def many_items(sender: Sender) -> str:
    """As many items as a response takes, and more than it takes."""
    items = [{"role": "user", "content": "a"}]
    bodies = ({"input": items * count, "max_output_tokens": 16} for count in (2_048, 8_000))
    calls = [sender.post("/v1/responses", json=body) for body in bodies]
    return _statuses(await asyncio.gather(*calls))


async def many_vectors(sender: Sender) -> str:
    """Eight calls for 256 vectors each."""
    body = {"input": [sender.text(400) for _ in range(256)]}
    calls = (sender.post("/v1/embeddings", json=body) for _ in range(8))
    return _statuses(await asyncio.gather(*calls))


def _statuses(answers: Sequence[httpx.Response]) -> str:
    return " ".join(sorted({str(answer.status_code) for answer in answers}))


MISDEEDS: Sequence[Misdeed] = (
    *(one_long_word, deep_page, many_documents, large_batch, long_lines, slow_patterns, trailers),
    *(slow_forms, large_upload, packed_body, long_chats, many_items, many_vectors),
)


class _Tenant(ABC):
    """Does all kinds of its deeds beside each other, again and again: `run` until `is_over`, or
    until cancelled."""

    def __init__(self, urls: Sequence[str], key: str, seed: int, deeds: Sequence[Deed]) -> None:
        self._urls, self._key, self._seed, self._deeds = urls, key, seed, deeds
        self.is_over = False

    async def run(self) -> None:
        """All kinds."""
        async with asyncio.TaskGroup() as group:
            for deed in self._deeds:
                group.create_task(self._repeat(deed))

    async def _repeat(self, deed: Deed) -> None:
        name = deed.__name__
        sender = Sender(self._urls, self._key, random.Random(f"{self._seed} {name}"))
        try:
            while not self.is_over:
                await self._do(name, deed, sender)
                await asyncio.sleep(PAUSE_S)
        finally:
            await sender.close()

    @abstractmethod
    async def _do(self, name: str, deed: Deed, sender: Sender) -> None:
        """Once, and note what became of it."""


class HostileTenant(_Tenant):
    """`run` until cancelled."""

    def __init__(self, urls: Sequence[str], key: str, seed: int) -> None:
        super().__init__(urls, key, seed, MISDEEDS)
        self.ended: Counter[tuple[str, str]] = Counter()  # by misdeed, and how

    async def _do(self, name: str, deed: Deed, sender: Sender) -> None:
        try:
            ended = await deed(sender)
        except httpx.HTTPStatusError as error:
            ended = str(error.response.status_code)
        except (httpx.HTTPError, OSError) as error:
            ended = type(error).__name__
        self.ended[name, ended] += 1


# The other one


async def small_file(sender: Sender) -> None:
    """Kept, indexed and found."""
    path = await sender.store("a.txt", _TEXT)
    store = path.partition("/files/")[0]
    await _until_completed(sender, path.removesuffix("/content"))
    answer = await sender.post(f"{store}/search", json={"query": "Ilse Brandt"})
    if not answer.raise_for_status().json()["data"]:
        raise NotReady(f"{store}: completed, and not found")


async def small_batch(sender: Sender) -> None:
    """One line, answered."""
    await _until_completed(sender, await sender.batch(["Hello"]))


async def form(sender: Sender) -> None:
    """An answer by a schema that nobody asked for before."""
    schema = {**_SCHEMA, "title": str(sender.rng.random())}
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    answer = await sender.chat("Hello", response_format=wanted, max_tokens=64)
    answer.raise_for_status()


async def vectors(sender: Sender) -> None:
    """Of two texts."""
    (await sender.post("/v1/embeddings", json={"input": ["quay", "ship"]})).raise_for_status()


async def _until_completed(sender: Sender, path: str) -> None:
    while (status := (await sender.get(path))["status"]) != "completed":
        if status not in ("validating", "in_progress", "finalizing"):
            raise NotReady(f"{path}: {status}")
        await asyncio.sleep(_LOOK_S)


ERRANDS: Sequence[Errand] = (small_file, small_batch, form, vectors)


class Errands(_Tenant):
    """`run` until `is_over`."""

    def __init__(self, urls: Sequence[str], key: str, seed: int) -> None:
        super().__init__(urls, key, seed, ERRANDS)
        self.seconds: dict[str, list[float]] = defaultdict(list)  # by errand
        self.failed: list[str] = []

    async def _do(self, name: str, deed: Deed, sender: Sender) -> None:
        began_s = time.monotonic()
        why = await self._done(deed, sender)
        if why:
            self.failed.append(f"{name}: {why}")
        else:
            self.seconds[name].append(time.monotonic() - began_s)

    async def _done(self, errand: Deed, sender: Sender) -> str:
        """Why it was not; empty where it was."""
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
