"""A tenant that sends calls which once made Trivium unusable for all other tenants.

    python -m infra.bench.tenants.hostile KEY SEED URL...

It is a separate process, so that sending does not delay the clients that are measured. `MISDEEDS`
run at the same time, each with a pause before it repeats, until stdin ends. Writes counts of how
each ended to stdout as JSON; they are informative only.
"""

import asyncio
import base64
import contextlib
import gzip
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx

from infra.bench.tenants.sender import CHAT, Tenant, TenantClient

Misdeed = Callable[[TenantClient], Awaitable[str]]  # returns how it ended
_TRICKLES_S = 20.0
_BOUNDARY = "part"


async def one_long_word(sender: TenantClient) -> str:
    """Index 500 kB without a space, which embedding workers read."""
    await sender.store("word.txt", base64.b64encode(sender.rng.randbytes(375_000)))
    return "stored"


async def deep_page(sender: TenantClient) -> str:
    """Index 80 kB of deeply nested HTML, and ask for its text 34 times without waiting."""
    path = await sender.store("deep.html", b"<b>a" * 20_000)
    await asyncio.gather(*(sender.hang_up("GET", path) for _ in range(34)))
    return "hung up"


async def many_documents(sender: TenantClient) -> str:
    """Index 20 000 documents in one file of 469 kB."""
    await sender.store("m.jsonl", b"\n".join(b'{"id":"%d","text":"a"}' % n for n in range(20_000)))
    return "stored"


async def large_batch(sender: TenantClient) -> str:
    """Create a batch of 1 000 lines, and cancel the rest of it after `_TRICKLES_S`."""
    path = await sender.batch([f"{n} {sender.rng.random()}" for n in range(1_000)])
    await asyncio.sleep(_TRICKLES_S)
    return str((await sender.post(f"{path}/cancel")).status_code)


async def long_lines(sender: TenantClient) -> str:
    """Create a batch with lines of 33 kB and some of 264 kB."""
    await sender.batch([sender.text(33_000) for _ in range(16)] + [sender.text(264_000)] * 4)
    return "sent"


async def slow_patterns(sender: TenantClient) -> str:
    """Send 34 chats at once with a pattern that takes long to check."""
    parts = "".join(f"[\\u0000-\\uffff]{{{number}}}" for number in range(100, 120))
    pattern = f"(?i){parts}{sender.rng.random()}"
    calls = (sender.chat("a", structured_outputs={"regex": pattern}) for _ in range(34))
    return _statuses(await asyncio.gather(*calls))


async def trailers(sender: TenantClient) -> str:
    """Send a megabyte of trailers after a body."""
    head = b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    return await sender.raw("GET /v1/models HTTP/1.1", [head, *[b"X: y\r\n" * 5_000] * 35], 1.0)


async def slow_forms(sender: TenantClient) -> str:
    """Send eight uploads that arrive a byte at a time."""
    head = (
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\nContent-Length: 100000\r\n\r\n"
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    ).encode()
    pieces = [head, *[b"a"] * 20]
    forms = (sender.raw("POST /v1/files HTTP/1.1", pieces, _TRICKLES_S) for _ in range(8))
    return " ".join(sorted(set(await asyncio.gather(*forms))))


async def large_upload(sender: TenantClient) -> str:
    """Upload a file of 16 MiB and keep it."""
    await sender.upload("a.bin", bytes(16 << 20))
    return "kept"


async def packed_body(sender: TenantClient) -> str:
    """Send a gigabyte that is compressed to a few megabytes."""
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    packed = await asyncio.to_thread(gzip.compress, bytes(1 << 26), 1)
    return str((await sender.post(CHAT, content=packed * 16, headers=headers)).status_code)


async def long_chats(sender: TenantClient) -> str:
    """Send eight prompts of 33 kB and disconnect early."""
    body = {"messages": [{"role": "user", "content": sender.text(33_000)}], "max_tokens": 256}
    await asyncio.gather(*(sender.hang_up("POST", CHAT, json=body) for _ in range(8)))
    return "hung up"


async def many_items(sender: TenantClient) -> str:
    """Send as many input items as a response may have, and more than it may have."""
    items = [{"role": "user", "content": "a"}]
    bodies = ({"input": items * count, "max_output_tokens": 16} for count in (2_048, 8_000))
    calls = [sender.post("/v1/responses", json=body) for body in bodies]
    return _statuses(await asyncio.gather(*calls))


async def many_vectors(sender: TenantClient) -> str:
    """Send eight calls for 256 embeddings each."""
    body = {"input": [sender.text(400) for _ in range(256)]}
    calls = (sender.post("/v1/embeddings", json=body) for _ in range(8))
    return _statuses(await asyncio.gather(*calls))


def _statuses(answers: Sequence[httpx.Response]) -> str:
    return " ".join(sorted({str(answer.status_code) for answer in answers}))


MISDEEDS: Sequence[Misdeed] = (
    *(one_long_word, deep_page, many_documents, large_batch, long_lines, slow_patterns, trailers),
    *(slow_forms, large_upload, packed_body, long_chats, many_items, many_vectors),
)


class HostileTenant(Tenant):
    """Repeats misdeeds until cancelled and counts how they ended."""

    def __init__(self, urls: Sequence[str], key: str, seed: int) -> None:
        super().__init__(urls, key, seed, MISDEEDS)
        self.endings: Counter[tuple[str, str]] = Counter()  # by misdeed and ending

    async def _do(self, name: str, deed: Misdeed, sender: TenantClient) -> None:
        try:
            ending = await deed(sender)
        except httpx.HTTPStatusError as error:
            ending = str(error.response.status_code)
        except (httpx.HTTPError, OSError) as error:
            ending = type(error).__name__
        self.endings[name, ending] += 1


@contextlib.asynccontextmanager
async def hostile(urls: Sequence[str], key: str, seed: int) -> AsyncIterator[dict[str, int]]:
    """Run a hostile tenant meanwhile; at its end it fills the yielded counts of endings."""
    endings: dict[str, int] = {}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, key, str(seed), *urls),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield endings
    finally:
        stdout, _ = await child.communicate(b"")  # closes its stdin
    endings |= json.loads(stdout)


async def _run_until_eof(tenant: HostileTenant) -> None:
    running = asyncio.create_task(tenant.run())
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    await asyncio.wait([running])
    counts = sorted(tenant.endings.items())
    print(json.dumps({f"{name}: {ending}": count for (name, ending), count in counts}))


if __name__ == "__main__":
    asyncio.run(_run_until_eof(HostileTenant(sys.argv[3:], sys.argv[1], int(sys.argv[2]))))
