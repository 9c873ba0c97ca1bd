"""The load generator against a scripted server: what it counts, and what it refuses."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from infra.bench.serving.load_generator import CellFigures, OfferedLoad, measure
from infra.bench.serving.sse_client import StreamedAnswer, parse_answer, whole_text
from tests.waits import PATIENCE_S, until

WORDS = [b" one", b" two", b" three", b" four"]
TEXT = b"".join(WORDS)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
WINDOW_S = 50  # nobody waits for its end where the requests are counted
Script = Callable[[int], Sequence[bytes]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def event(text: bytes) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answered(words: Sequence[bytes] = WORDS) -> list[bytes]:
    """Writes of a good answer."""
    return [HEAD + chunk(event(b"")), *(chunk(event(w)) for w in words), chunk(DONE), b"0\r\n\r\n"]


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """A server on a free port; in the end its connections are closed, those just made too."""
    serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        disconnects = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*disconnects):
            await serve(reader, writer)
        writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving[asyncio.create_task(serve_one(reader, writer))] = writer

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task, writer in serving.items():
            task.cancel()
            writer.close()  # a task that has not begun does not
        await until(lambda: len(asyncio.all_tasks()) == 1)


def serving(script: Script) -> AbstractAsyncContextManager[int]:
    """A server whose n-th answer is `script(n)`; an empty write drops the connection."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            number, count = count, count + 1
            for data in script(number):
                if not data:
                    return
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)

    return listening(serve)


def measured(script: Script, **changes: object) -> CellFigures:
    async def main() -> CellFigures:
        async with asyncio.timeout(PATIENCE_S), serving(script) as port:
            load = {"streams": 2, "requests_max": 6, "tokens": 4, "settle_s": 0}
            bodies, expected = ["{}", '{"a": 1}'], [TEXT.decode()] * 2
            return await measure(
                OfferedLoad(
                    host="127.0.0.1",
                    port=port,
                    bodies=bodies,
                    window_s=WINDOW_S,
                    **{"expected": expected, **load, **changes},  # type: ignore[arg-type]
                )
            )

    return asyncio.run(main())


def test_closed_loop_counts_whole_answers() -> None:
    figures = measured(lambda _: answered())
    assert figures.requests >= 6 and figures.errors == {}
    assert figures.requests_per_s == pytest.approx(figures.requests / WINDOW_S)
    assert figures.ttft_ms["p50"] is not None and figures.ttft_ms["p50"] < WINDOW_S * 1_000
    assert figures.texts == []


def test_open_loop_sends_at_rate_and_reuses_connections() -> None:
    figures = measured(lambda _: answered(), streams=0, rate_per_s=200.0, seed=3)
    assert figures.requests == 6 and figures.errors == {}


def test_load_generator_returns_texts_without_expectation() -> None:
    assert measured(lambda _: answered(), expected=()).texts == [TEXT.decode()] * 2


BROKEN: list[tuple[str, list[bytes], str]] = [
    ("status", [b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"], "status 429"),
    ("cut", [HEAD + chunk(event(b" one")), b""], "connection lost"),
    ("short", answered(WORDS[:3]), "3 tokens"),
    ("repeat", answered([*WORDS, b" four"]), "5 tokens"),
    ("order", answered([WORDS[1], WORDS[0], *WORDS[2:]]), "other tokens"),
    ("no end", [HEAD, *(chunk(event(w)) for w in WORDS), b"0\r\n\r\n"], "broken off"),
]


@pytest.mark.parametrize(("writes", "error"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_load_generator_counts_incomplete_answer_as_error(writes: list[bytes], error: str) -> None:
    figures = measured(lambda _: writes, streams=1, requests_max=1)
    assert figures.errors.get(error) == 1 and figures.requests == 0


def test_load_generator_joins_events_split_by_chunks() -> None:
    cut = event(b" one two")
    writes = [HEAD + chunk(cut[:30]), chunk(cut[30:]) + chunk(event(b" three four")), chunk(DONE)]
    figures = measured(lambda _: [*writes, b"0\r\n", b"\r\n"])
    assert figures.requests >= 6 and figures.errors == {}


def test_load_generator_counts_endless_answer_as_unfinished() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD)
        await asyncio.Event().wait()

    async def main() -> CellFigures:
        async with listening(serve) as port:
            load = OfferedLoad(
                host="127.0.0.1", port=port, bodies=["{}"], streams=2, window_s=0.1, settle_s=0,
                drain_s=0.1,
            )  # fmt: skip
            return await measure(load)

    figures = asyncio.run(main())
    assert figures.errors == {"unfinished": 2} and figures.ttft_ms["p50"] is None


def test_load_generator_counts_unreachable_server() -> None:
    with socket.socket() as bound_socket:  # the port is taken, and nobody listens
        bound_socket.bind(("127.0.0.1", 0))
        load = {"port": bound_socket.getsockname()[1], "bodies": ["{}"], "window_s": 0.1}
        figures = asyncio.run(measure_one(host="127.0.0.1", streams=2, **load))
    assert figures.errors == {"not connected": 2}


async def measure_one(**load: Any) -> CellFigures:
    return await measure(OfferedLoad(**load))


def test_parse_answer_splits_reads_into_tokens() -> None:
    answer = StreamedAnswer(due_s=1.0, prompt=0)
    last = chunk(event(b" three")) + chunk(DONE)
    parts = [HEAD + chunk(event(b"")), chunk(event(b" one two")), last]
    parse_answer(answer, [1.1, 1.2, 1.3], parts)
    assert answer.reads == [(1.2, 2), (1.3, 1)] and answer.first_token_s == 1.2
    assert (answer.error, answer.text, answer.ended_s) == ("", b" one two three", 1.3)
    assert whole_text(parts) == b" one two three"
