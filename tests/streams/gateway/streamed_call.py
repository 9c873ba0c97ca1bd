"""Streamed calls of tests, straight on ASGI, which run while the test does other things."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson

from schemas.records import Request
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import frame, stream_end
from tests.waits import PATIENCE_S, until

WITH_IDS = {"X-Trivium-Event-Ids": "true"}  # for clients that resume
TEXTS = ["Hé", "llo", " ", "wör", "ld"]


class StreamedCall:
    """One streamed call, straight on ASGI, whose client can hang up."""

    def __init__(self, gateway: InProcessGateway) -> None:
        self._gateway = gateway
        self.status = 0
        self.headers: dict[str, str] = {}
        self.writes: list[str] = []
        self.over = False
        self._disconnect_event = asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(self.writes)

    @property
    def ids(self) -> list[str]:
        return [line[4:] for line in self.text.splitlines() if line.startswith("id: ")]

    async def run(
        self, body: dict[str, Any], path: str, query: str, headers: dict[str, str]
    ) -> None:
        raw: list[bytes] = [orjson.dumps(body)]

        async def receive() -> dict[str, Any]:
            if raw:
                return {"type": "http.request", "body": raw.pop(), "more_body": False}
            await self._disconnect_event.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                self.writes.append(message["body"].decode())
                self.over = not message.get("more_body", False)

        scope = {
            "type": "http",
            "method": "POST" if body else "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()]
            + [(b"content-type", b"application/json")],
        }
        await self._gateway.app(scope, receive, send)

    def hang_up(self) -> None:
        self._disconnect_event.set()


@contextlib.asynccontextmanager
async def streamed_call(
    gateway: InProcessGateway,
    body: dict[str, Any] | None = None,
    path: str = "/v1/chat/completions",
    query: str = "",
    **headers: str,
) -> AsyncIterator[StreamedCall]:
    """A call that runs while the test does other things."""
    stream = StreamedCall(gateway)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    task = asyncio.get_running_loop().create_task(stream.run(body or {}, path, query, names))
    try:
        yield stream
    finally:
        stream.hang_up()
        async with asyncio.timeout(PATIENCE_S):
            await task


async def accepted_requests(gateway: InProcessGateway, count: int = 1) -> list[Request]:
    await gateway.log.wait_sent(count)
    return gateway.log.requests


async def whole_stream(
    gateway: InProcessGateway,
    body: dict[str, Any],
    texts: list[str],
    path: str = "/v1/chat/completions",
) -> StreamedCall:
    """A stream whose tokens come one by one, to its end; it can be resumed."""
    async with streamed_call(gateway, body, path, X_Session_Id="mine", **WITH_IDS) as stream:
        requests = await accepted_requests(gateway, body.get("n", 1))
        for seq in range(len(texts)):
            for request in requests:
                before = len("".join(texts[:seq]))
                end = stream_end(request.request_id, texts) if seq == len(texts) - 1 else None
                await gateway.log.push(
                    frame(request.request_id, [texts[seq]], first_seq=seq, first_char=before,
                          end=end)
                )  # fmt: skip
            await until(lambda seq=seq: len(stream.writes) == seq + 1)
    return stream
