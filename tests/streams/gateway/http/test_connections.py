"""Connections that give nothing: half a request, an answer that nobody reads, one too many."""

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from streams.gateway.http.server import OTHER_FILES, allow_files
from streams.gateway.http.slow_clients import PatientProtocol
from tests.streams.gateway.in_process import InProcessGateway, call, http_client, serving
from tests.streams.gateway.samples import chat, frame
from tests.waiting import until

CHATS = "/v1/chat/completions"
BODY = json.dumps(chat(stream=True)).encode()
HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHATS.encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@contextlib.asynccontextmanager
async def plain(url: str, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A connection of its own, on which these bytes were sent; gives what comes back."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    reader, writer = await asyncio.open_connection(sock=sock, limit=4_096)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def answer_of(gateway: InProcessGateway, sent: bytes) -> bytes:
    """All that comes back until the server closes."""
    async with serving(gateway) as url, plain(url, sent) as reader:
        return await reader.read()


@pytest.mark.parametrize(
    ("sent", "limits", "part"),
    [
        (b"", {"head_ms": 1}, b"head"),
        (HEAD, {"head_ms": 1}, b"head"),
        (HEAD + b"content-length: 9\r\n\r\n", {"body_ms": 1}, b"body"),
        (HEAD + b"content-length: 9\r\n\r\n{", {"body_ms": 1}, b"body"),
    ],
)
async def test_half_a_request_is_not_waited_for_without_end(
    sent: bytes, limits: dict[str, Any], part: bytes
) -> None:
    """Nothing at all, half a head, half a body (issue 10, 18)."""
    gateway = InProcessGateway(**limits)
    answer = await answer_of(gateway, sent)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the %b of the request was not complete within 1 ms" % part in answer
    assert not gateway.log.sent


async def test_a_second_head_that_never_comes_is_not_waited_for() -> None:
    """On a connection that has had its answer (issue 10, 18)."""
    gateway = InProcessGateway(idle_ms=1)
    get = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert (await answer_of(gateway, get)).startswith(b"HTTP/1.1 200 ")
    later = await answer_of(InProcessGateway(head_ms=300), get + b"GET /health")
    assert b" 200 " in later and b" 408 " in later


@pytest.mark.parametrize("behind", [b"", HEAD, WHOLE, WHOLE[:-1]])
async def test_an_answer_that_takes_long_is_no_late_request(
    behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream goes on, whatever begins to arrive behind its request (issue 10, 18)."""
    looks, look = [], PatientProtocol.look

    def look_an_hour_later(connection: PatientProtocol, now_s: float) -> None:
        looks.append(now_s)
        if gateway.log.sent:
            look(connection, now_s + 3_600)

    monkeypatch.setattr(PatientProtocol, "look", look_an_hour_later)
    gateway = InProcessGateway()
    async with serving(gateway) as url, plain(url, WHOLE + behind) as reader:
        await gateway.log.wait_sent(1)
        looks.clear()
        await until(lambda: len(looks) > 1)
        await gateway.log.push(frame(gateway.log.requests[0].request_id, ["x"]))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert not gateway.log.cancellations


async def unread(gateway: InProcessGateway, then: Callable[[InProcessGateway], None]) -> None:
    """A streamed answer of megabytes whose client reads none of it, until it has no place more."""
    async with serving(gateway) as url, plain(url, WHOLE):
        await gateway.log.wait_sent(1)
        name, size = gateway.log.requests[0].request_id, 1 << 20
        for seq in range(16):
            await gateway.log.push(frame(name, ["x" * size], first_seq=seq, first_char=seq * size))
        then(gateway)
        await until(lambda: gateway.state.in_flight == 0)
        await gateway.log.wait_sent(2)
    assert gateway.log.cancellations, "its work is cancelled too"


async def test_a_client_that_does_not_read_loses_its_place() -> None:
    """After `write_ms`, long before the deadline (issue 10, 18)."""
    await unread(InProcessGateway(write_ms=1), lambda gateway: None)


async def test_a_deadline_holds_for_clients_that_do_not_read() -> None:
    """Its place was kept an hour beyond (issue 10, 18)."""

    def pass_deadline(gateway: InProcessGateway) -> None:
        for _ in range(2):
            asyncio.get_running_loop().call_soon(gateway.state.sweep, 0.0, 2**62)

    await unread(InProcessGateway(write_ms=3_600_000), pass_deadline)


async def test_connections_are_bounded() -> None:
    """One too many is told so; when one ends, there is room again (issue 10, 18)."""
    gateway = InProcessGateway(connections_max=2)
    async with serving(gateway) as url, http_client(url) as client:
        async with plain(url), plain(url):
            async with plain(url) as third:
                answer = await third.read()
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"at most 2 connections" in answer

        async def is_served() -> bool:
            return (await client.get("/health/live")).status_code == 200

        await until(is_served)


async def test_bodies_are_bounded_together_while_they_are_read() -> None:
    """Not each alone, and before anything is admitted (issue 10, 18)."""
    gateway = InProcessGateway(bodies_bytes_max=1_000)
    half = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b" " * 900
        half.set()
        await release.wait()
        yield json.dumps(chat()).encode()

    release = asyncio.Event()
    headers = {"content-type": "application/json"}
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post(CHATS, content=slowly(), headers=headers))
        await half.wait()
        refused = await client.post(CHATS, content=b" " * 200, headers=headers)
        assert refused.status_code == 429
        assert "at most 1000 bytes of bodies" in refused.json()["error"]["message"]
        gateway.answer_with("ok")
        release.set()
        assert (await first).status_code == 200
    assert (await call(gateway, b" " * 900 + json.dumps(chat()).encode()))[0] == 200, (
        "what was read is given back"
    )


async def test_a_full_gateway_refuses_before_it_reads_the_body() -> None:
    """A body is not even asked for (issue 10, 18)."""
    gateway = InProcessGateway(in_flight_max=1)
    async with serving(gateway) as url, plain(url, WHOLE):
        await gateway.log.wait_sent(1)
        head = HEAD + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n"
        async with plain(url, head) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")


def test_the_process_may_open_as_many_files_as_there_may_be_connections() -> None:
    """Or as many as the system allows; a bound that the system undercuts is none (issue 10, 18)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
        allow_files(1_000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft >= 1_000 + OTHER_FILES or soft == hard
        allow_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft, "never fewer"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_who_sends_too_much_sees_the_answer() -> None:
    """The rest of the body is forgotten instead of cut off, and the connection serves on (18)."""
    gateway = InProcessGateway(body_bytes_max=1_000)
    gateway.answer_with("ok")
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for size, expected in ((10, 200), (8 << 20, 413), (10, 200)):
            response = await client.post(CHATS, json=chat("x" * size, max_tokens=1))
            assert response.status_code == expected
