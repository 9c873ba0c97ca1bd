"""Connections that give nothing: half a request, an answer that nobody reads, one too many."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from streams.gateway.http.slow_clients import PatientProtocol
from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.raw_connection import HEAD, WHOLE, raw_connection
from tests.streams.gateway.samples import frame
from tests.waits import until


async def answer_of(gateway: InProcessGateway, payload: bytes) -> bytes:
    """All that comes back until the server closes."""
    async with serving(gateway) as url, raw_connection(url, payload) as reader:
        return await reader.read()


async def unread(gateway: InProcessGateway, then: Callable[[InProcessGateway], None]) -> None:
    """A streamed answer of megabytes whose client reads none of it, until it has no place more."""
    async with serving(gateway) as url, raw_connection(url, WHOLE):
        await gateway.log.wait_sent(1)
        name, size = gateway.log.requests[0].request_id, 1 << 20
        for seq in range(16):
            await gateway.log.push(frame(name, ["x" * size], first_seq=seq, first_char=seq * size))
        then(gateway)
        await until(lambda: gateway.state.calls.in_flight == 0)
        await gateway.log.wait_sent(2)
    assert gateway.log.cancellations, "its work is cancelled too"


@pytest.mark.parametrize(
    ("payload", "limits", "part"),
    [
        (b"", {"head_ms": 1}, b"head"),
        (HEAD, {"head_ms": 1}, b"head"),
        (HEAD + b"content-length: 9\r\n\r\n", {"body_ms": 1}, b"body"),
        (HEAD + b"content-length: 9\r\n\r\n{", {"body_ms": 1}, b"body"),
    ],
)
async def test_gateway_returns_408_for_incomplete_request(
    payload: bytes, limits: dict[str, Any], part: bytes
) -> None:
    """It may lack everything, half of the head, or half of the body."""
    gateway = InProcessGateway(**limits)
    answer = await answer_of(gateway, payload)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the %b of the request was not complete within 1 ms" % part in answer
    assert not gateway.log.sent_records


async def test_gateway_returns_408_for_incomplete_second_head() -> None:
    gateway = InProcessGateway(idle_ms=1)
    get = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert (await answer_of(gateway, get)).startswith(b"HTTP/1.1 200 ")
    later = await answer_of(InProcessGateway(head_ms=300), get + b"GET /health")
    assert b" 200 " in later and b" 408 " in later


@pytest.mark.parametrize("behind", [b"", HEAD, WHOLE, WHOLE[:-1]])
async def test_long_answer_is_not_counted_as_late_request(
    behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream continues whatever begins to arrive behind its request."""
    checks, end_if_late = [], PatientProtocol.end_if_late

    def check_an_hour_later(connection: PatientProtocol, now_s: float) -> None:
        checks.append(now_s)
        if gateway.log.sent_records:
            end_if_late(connection, now_s + 3_600)

    monkeypatch.setattr(PatientProtocol, "end_if_late", check_an_hour_later)
    gateway = InProcessGateway()
    async with serving(gateway) as url, raw_connection(url, WHOLE + behind) as reader:
        await gateway.log.wait_sent(1)
        checks.clear()
        await until(lambda: len(checks) > 1)
        await gateway.log.push(frame(gateway.log.requests[0].request_id, ["x"]))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert not gateway.log.cancellations


async def test_client_that_does_not_read_is_cancelled_after_write_timeout() -> None:
    """This takes `write_ms`, which is far less than the deadline."""
    await unread(InProcessGateway(write_ms=1), lambda gateway: None)


async def test_deadline_ends_stream_of_client_that_does_not_read() -> None:
    def pass_deadline(gateway: InProcessGateway) -> None:
        for _ in range(2):
            asyncio.get_running_loop().call_soon(gateway.state.calls.sweep, 0.0, 2**62)

    await unread(InProcessGateway(write_ms=3_600_000), pass_deadline)


async def test_gateway_limits_connections() -> None:
    """The gateway answers one connection too many with 429, until another one ends."""
    gateway = InProcessGateway(connections_max=2)
    async with serving(gateway) as url, http_client(url) as client:
        async with raw_connection(url), raw_connection(url):
            async with raw_connection(url) as third:
                answer = await third.read()
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"at most 2 connections" in answer

        async def is_served() -> bool:
            return (await client.get("/health/live")).status_code == 200

        await until(is_served)
