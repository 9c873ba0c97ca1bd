"""A lean HTTP/1.1 client for one streamed chat at a time, and the parser of its answers.

While bytes arrive it only records their times. It parses the answer after its end, so that the
client uses as little as possible of the cores that it shares with the servers under test. Expects
answers of the simulated engine: each token is a space and a word.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

_CONTENT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)*)"')
_END = b"0\r\n\r\n"  # the last chunk of a chunked body
_OK = b"HTTP/1.1 200"
_CHUNK_SIZE = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")


def chat_body(model: str, question: str, tokens: int) -> str:
    """Return the JSON body of a greedy streamed chat."""
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
    )


def chat_call(host: str, port: int, body: str) -> bytes:
    """Return the bytes of an HTTP call with this body."""
    data = body.encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclass(slots=True, kw_only=True)
class StreamedAnswer:
    """One streamed answer. Times are `time.perf_counter`, since an event loop's are too coarse."""

    due_s: float  # when the request was due
    prompt: int
    error: str = ""
    first_token_s: float = 0.0
    ended_s: float = 0.0
    reads: list[tuple[float, int]] = field(default_factory=list)  # time, and number of tokens
    text: bytes = b""


def parse_answer(answer: StreamedAnswer, times: list[float], parts: list[bytes]) -> None:
    """Set tokens and times from the parts that were read; set `error` if the answer is partial."""
    answer.ended_s = times[-1] if times else answer.due_s
    if not parts or not parts[0].startswith(_OK):
        answer.error = "status " + (parts[0][9:12].decode(errors="replace") if parts else "none")
        return
    texts = [b"".join(_CONTENT.findall(part)) for part in parts]
    answer.text = b"".join(texts)
    body = b"".join(parts)
    if b"data: [DONE]" not in body and b"[DONE]" not in _CHUNK_SIZE.sub(b"", body):
        answer.error = "broken off"
    for when_s, text in zip(times, texts, strict=True):
        if count := text.count(b" "):
            answer.reads.append((when_s, count))
    if answer.reads:
        answer.first_token_s = answer.reads[0][0]


def whole_text(parts: list[bytes]) -> bytes:
    """Return the text of an answer whose events chunks or reads have split. Slow and exact."""
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(_CONTENT.findall(b"".join(chunks)))


class SseConnection(asyncio.Protocol):
    """A keep-alive connection that calls `on_end` with each finished answer."""

    def __init__(
        self,
        on_end: Callable[["SseConnection", StreamedAnswer], None],
        expected: Mapping[int, bytes],
        tokens: int,
    ) -> None:
        self._on_end = on_end
        self._expected = expected
        self._tokens = tokens
        self._transport: asyncio.Transport | None = None
        self._times: list[float] = []
        self._parts: list[bytes] = []
        self.answer: StreamedAnswer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def usable(self) -> bool:
        """Whether it is connected and has no request in flight."""
        return self._transport is not None and self.answer is None

    def send(self, request: bytes, answer: StreamedAnswer) -> None:
        """Write one request and begin to read its answer."""
        assert self._transport is not None and self.answer is None
        self.answer, self._times, self._parts = answer, [], []
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._parts.append(data)
        if data.endswith(_END) or (
            len(data) < len(_END) and b"".join(self._parts[-3:]).endswith(_END)
        ):
            self._finish("")
        elif not self._parts[0].startswith(_OK) and len(self._parts[0]) >= len(_OK):
            self._finish("")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish("connection lost")

    def close(self) -> None:
        """Abort the connection and any request in flight."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _finish(self, error: str) -> None:
        answer, self.answer = self.answer, None
        if answer is None:
            return
        parse_answer(answer, self._times, self._parts)
        answer.error = error or answer.error or self._verdict(answer)
        self._on_end(self, answer)

    def _verdict(self, answer: StreamedAnswer) -> str:
        expected = self._expected.get(answer.prompt)
        if expected is None or answer.text != expected:
            answer.text = whole_text(self._parts)
        if (count := answer.text.count(b" ")) != self._tokens:
            return f"{count} tokens"
        return "" if expected is None or answer.text == expected else "other tokens"
