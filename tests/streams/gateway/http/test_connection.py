"""Connections that end half-way, wait behind others, or bring more than a request has."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.raw_connection import (
    BODY,
    HEAD,
    WHOLE,
    ReadBytes,
    address_of,
    raw_connection,
)
from tests.streams.gateway.samples import chat, events_of, frame, stream_end, text_of
from tests.waits import until

NOT_STREAMED = json.dumps(chat()).encode()
ONE = HEAD + b"content-length: %d\r\n\r\n" % len(NOT_STREAMED) + NOT_STREAMED
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(BODY), BODY)
LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
MakeLoop = Callable[[], asyncio.AbstractEventLoop]


async def answer_last(gateway: InProcessGateway, *texts: str) -> None:
    """The whole answer to the last request."""
    name = gateway.log.requests[-1].request_id
    await gateway.log.push(frame(name, [*texts], end=stream_end(name, texts)))


@LOOPS
@pytest.mark.parametrize("payload", [WHOLE, ONE, GET + b"\r\n" + ONE, ONE + GET + b"\r\n"])
def test_half_closed_connection_gets_whole_answer(make_loop: MakeLoop, payload: bytes) -> None:
    """`nc -N` and shells close their side after the request."""

    async def run() -> bytes:
        gateway = InProcessGateway()
        async with serving(gateway) as url, raw_connection(url, payload, ends=True) as reader:
            await gateway.log.wait_sent(1)
            await until(lambda: gateway.state.calls.in_flight == 1)
            first_byte = await reader.readexactly(1)  # it is told that it is being answered
            await answer_last(gateway, "a", "b")
            answers = first_byte + await reader.read()
            assert not gateway.log.cancellations
            return answers

    with asyncio.Runner(loop_factory=make_loop) as runner:
        answers = runner.run(run())
    count = payload.count(b"HTTP/1.1\r\n")
    assert answers.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == count
    assert b'"content":"ab"' in answers or b'"content":"a' in answers


@LOOPS
@pytest.mark.parametrize("payload", [WHOLE, ONE, WHOLE + GET + b"\r\n", ONE + WHOLE])
def test_disconnect_cancels_request_before_first_token(make_loop: MakeLoop, payload: bytes) -> None:
    """More requests may follow it on the connection."""

    async def run() -> None:
        gateway = InProcessGateway()
        async with serving(gateway) as url:
            _, writer = await asyncio.open_connection(*address_of(url))
            writer.write(payload)
            await gateway.log.wait_sent(1)
            writer.close()
            await gateway.log.wait_sent(2)
            await until(lambda: gateway.state.calls.in_flight == 0)
        (cancellation,) = gateway.log.cancellations
        assert cancellation.request_id == gateway.log.requests[0].request_id

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())


@LOOPS
@pytest.mark.parametrize("has_gone", [True, False])
def test_half_closed_stream_continues_and_closed_one_is_cancelled(
    make_loop: MakeLoop, has_gone: bool
) -> None:
    """In the middle of a stream the two look the same until something is written."""

    async def run() -> None:
        gateway = InProcessGateway()
        async with serving(gateway) as url:
            reader, writer = await asyncio.open_connection(*address_of(url))
            writer.write(WHOLE)
            await gateway.log.wait_sent(1)
            name = gateway.log.requests[0].request_id
            await gateway.log.push(frame(name, ["a"]))
            stream_start = await reader.readuntil(b'"a"') + await reader.readuntil(b"\n\n\r\n")
            writer.write_eof()
            if has_gone:
                writer.close()
                await gateway.log.wait_sent(2)
                assert gateway.log.cancellations
                return
            stream_start += await reader.readexactly(1)
            end = stream_end(name, "ab")
            await gateway.log.push(frame(name, ["b"], first_seq=1, first_char=1, end=end))
            answer = stream_start + await reader.read()
            writer.close()
            response = http.client.HTTPResponse(ReadBytes(answer))
            response.begin()
            assert text_of(events_of(response.read().decode())) == "ab"
            assert not gateway.log.cancellations

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("payload", [HEAD, HEAD + b"content-length: 9\r\n\r\n{", b"", GET])
async def test_incomplete_request_at_end_gets_no_answer(payload: bytes) -> None:
    gateway = InProcessGateway()
    async with serving(gateway) as url, raw_connection(url, payload, ends=True) as reader:
        assert await reader.read() == b""


async def test_whole_request_is_answered_before_incomplete_one() -> None:
    gateway = InProcessGateway()
    payload = WHOLE + HEAD + b"content-length: 9\r\n\r\n{"
    async with serving(gateway) as url, raw_connection(url, payload, ends=True) as reader:
        await gateway.log.wait_sent(1)
        await answer_last(gateway, "a")
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 ") == 1
    assert answers.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"no request\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: x\r\n" % i for i in range(9)) + b"\r\n", b"431"),
        (b"GET /" + b"x" * 4_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nnone\r\n", b"400"),
        ((GET + b"\r\n") * 130, b"429"),
    ],
)
async def test_bad_request_behind_stream_leaves_stream_whole(behind: bytes, status: bytes) -> None:
    """The error follows the stream, instead of standing in its middle."""
    gateway = InProcessGateway(header_bytes_max=2_000, headers_max=8)
    async with serving(gateway) as url, raw_connection(url, WHOLE + behind) as reader:
        await gateway.log.wait_sent(1)
        await answer_last(gateway, "a", "b")
        stream, _, rest = (await reader.read()).partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert text_of(events_of(stream.decode())) == "ab"
    assert rest.rpartition(b"HTTP/1.1 ")[2].startswith(status)
    assert b"connection: close" in rest


@contextlib.asynccontextmanager
async def bounded(payload: bytes, **settings: Any) -> AsyncIterator[tuple[InProcessGateway, bytes]]:
    """What a gateway with small bounds says to these bytes, until it closes."""
    gateway = InProcessGateway(header_bytes_max=2_000, headers_max=8, **settings)
    async with serving(gateway) as url, raw_connection(url, payload) as reader:
        yield gateway, await reader.read()


@pytest.mark.parametrize(
    "around",
    [
        b"0\r\n" + b"X: y\r\n" * 100_000,
        b"0\r\nX: " + b"y" * 500_000,
        b"0\r\n" + b"X" * 500_000,
        b"5;" + b"x" * 500_000,
        b"5" + b" " * 500_000,
    ],
    ids=["fields", "value", "name", "extension", "spaces"],
)
async def test_gateway_bounds_trailers_and_chunk_extensions(around: bytes) -> None:
    """Unbounded trailers would take the event loop for seconds."""
    async with bounded(CHUNKED + around) as (gateway, answer):
        assert not gateway.log.sent_records
    status = answer.removeprefix(b"HTTP/1.1 ")[:3]
    assert status in (b"431", b"400")
    assert b'"error"' in answer


async def test_trailers_are_ignored_as_headers() -> None:
    """Proxies strip headers such as keys, which could otherwise come in as trailers."""
    gateway = InProcessGateway(api_keys=("secret",))
    trailers = b"0\r\nAuthorization: Bearer secret\r\nX-Session-Id: mine\r\n\r\n"
    without_key = (
        GET.replace(b"/health", b"/v1/models") + b"transfer-encoding: chunked\r\n\r\n" + trailers
    )
    with_key = CHUNKED.replace(b"\r\n", b"\r\nauthorization: Bearer secret\r\n", 1) + trailers
    async with serving(gateway) as url, raw_connection(url, without_key + with_key) as reader:
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 401 ")
        await gateway.log.wait_sent(1)
        await answer_last(gateway, "a")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert gateway.log.requests[0].session_id != "mine"


async def test_unread_body_after_expect_closes_connection() -> None:
    """What follows on the connection might be the body or not (RFC 9110, 10.1.1)."""
    gateway = InProcessGateway(api_keys=("secret",))
    payload = HEAD + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    async with serving(gateway) as url, raw_connection(url, payload) as reader:
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


async def test_head_of_stream_returns_without_waiting_for_end() -> None:
    gateway = InProcessGateway()
    async with serving(gateway) as url, raw_connection(url, WHOLE), http_client(url) as client:
        await gateway.log.wait_sent(1)
        name = gateway.log.requests[0].request_id
        await gateway.log.push(frame(name, ["a"]))
        response = await client.head(f"/v1/requests/{name}/events")
        assert response.headers["content-type"].startswith("text/event-stream")
        assert (response.status_code, response.content) == (200, b"")
        await until(lambda: not gateway.state.calls.resumed)
