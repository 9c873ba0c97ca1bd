"""A trace sent to a gateway, on virtual time: when each request goes, and what is noted."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from infra.traces.sender import Pace, SentRequest, TraceSender
from infra.traces.trace import After, Arrival, Trace
from tests.virtual_time import virtual
from tests.waits import pass_time

ANSWER_S = 1.0


class Gateway(httpx.AsyncBaseTransport):
    """Answer each call after a second, in three chunks; refuse or break off some."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()
        self.calls: list[tuple[float, dict[str, Any], httpx.Headers]] = []
        self.under_way = self.in_flight_max = 0
        self.refuses: set[int] = set()
        self.breaks: set[int] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        number = len(self.calls)
        self.calls.append((round(time.monotonic() - self.begin_s, 3), body, request.headers))
        if number in self.refuses:
            return httpx.Response(429, json={"error": {"code": "queue_full", "message": "no"}})
        return httpx.Response(200, content=self._answer(len(body["prompt"]), number))

    async def _answer(self, prompt_tokens: int, number: int) -> AsyncIterator[bytes]:
        self.under_way += 1
        self.in_flight_max = max(self.in_flight_max, self.under_way)
        for text in ("", " a", " b", " c"):
            await pass_time(ANSWER_S / 4)
            event = {"choices": [{"text": text}]}
            yield f"data: {json.dumps(event)}\n\n".encode()
        self.under_way -= 1
        if number in self.breaks:
            return
        used = {"prompt_tokens": prompt_tokens, "completion_tokens": 3}
        yield f"data: {json.dumps({'choices': [], 'usage': used})}\n\ndata: [DONE]\n\n".encode()


def arrival(at_ms: float, session_id: str = "", **changes: Any) -> Arrival:
    """Return a request of 4 prompt tokens."""
    return Arrival(at_ms=at_ms, prompt_tokens=4, output_tokens=3, session_id=session_id, **changes)


async def sent_by(gateway: Gateway, pace: Pace, *arrivals: Arrival) -> list[SentRequest]:
    """Send all of the requests."""
    trace = Trace(format="test", arrivals=arrivals)
    async with httpx.AsyncClient(transport=gateway, base_url="http://gateway") as client:
        return await TraceSender(client, trace, "m", pace).run()


def times(gateway: Gateway) -> list[float]:
    """Return the time of each call, in seconds."""
    return [at_s for at_s, _, _ in gateway.calls]


@virtual
async def test_sender_follows_trace_times_scaled_by_speed() -> None:
    """The first request goes at once."""
    gateway = Gateway()
    requests = await sent_by(gateway, Pace(), *(arrival(at_ms) for at_ms in (9_000, 9_400, 12_000)))
    assert times(gateway) == [0.0, 0.4, 3.0]
    assert all(request.is_scheduled for request in requests)
    gateway = Gateway()
    await sent_by(gateway, Pace(speed=10), *(arrival(at_ms) for at_ms in (9_000, 9_400, 12_000)))
    assert times(gateway) == [0.0, 0.04, 0.3]


@virtual
async def test_sender_delays_turn_until_previous_answer_ends() -> None:
    gateway = Gateway()
    turns = arrival(0, "a"), arrival(100, "a"), arrival(200, "b"), arrival(5_000, "a")
    requests = await sent_by(gateway, Pace(), *turns)
    assert times(gateway) == [0.0, 0.2, 1.0, 5.0]
    assert [request.is_scheduled for request in requests] == [True, False, True, False]
    ids = [headers["x-session-id"] for _, _, headers in gateway.calls]
    assert ids[0] == ids[2] == ids[3] != ids[1]


@virtual
async def test_sender_keeps_delays_after_completion_and_dispatch() -> None:
    gateway = Gateway()
    await sent_by(
        gateway,
        Pace(speed=2),
        arrival(0, request_id="a"),
        arrival(0, after=(After(request_id="a", delay_ms=300),)),
        arrival(0, after=(After(request_id="a", delay_ms=300, trigger="dispatch"),)),
    )
    assert times(gateway) == [0.0, 0.15, 1.15]


@virtual
async def test_sender_at_max_speed_keeps_only_turn_order() -> None:
    gateway = Gateway()
    turns = arrival(0, "a"), arrival(60_000, "b"), arrival(90_000, "a")
    await sent_by(gateway, Pace(speed=math.inf), *turns)
    assert times(gateway) == [0.0, 0.0, 1.0]


@virtual
async def test_sender_limits_requests_in_flight() -> None:
    """A turn that waits takes no place."""
    gateway = Gateway()
    first = [arrival(0, "a"), arrival(1, "a"), arrival(2, "a")]
    single_turns = [arrival(3 + number) for number in range(4)]
    await sent_by(gateway, Pace(speed=math.inf, in_flight=2), *first, *single_turns)
    assert gateway.in_flight_max == 2
    assert times(gateway) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]


@virtual
async def test_sender_records_chunk_times_and_usage() -> None:
    gateway = Gateway()
    (request,) = await sent_by(gateway, Pace(), arrival(0, priority="batch"))
    assert [round(at_s - request.sent_s, 3) for at_s in request.chunks_s] == [0.5, 0.75, 1.0]
    assert (request.prompt_tokens, request.output_tokens, request.error) == (4, 3, "")
    _, body, headers = gateway.calls[0]
    assert (len(body["prompt"]), headers["x-priority"]) == (4, "batch")


@virtual
async def test_sender_reports_failure_and_continues_with_next_turn() -> None:
    gateway = Gateway()
    gateway.refuses, gateway.breaks = {0}, {1}
    requests = await sent_by(gateway, Pace(), *(arrival(at_ms, "a") for at_ms in (0, 1, 2)))
    assert [request.error for request in requests] == ["queue_full", "broken off", ""]


@virtual
async def test_sender_reports_unreachable_gateway_per_request() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("away", request=request)

    trace = Trace(format="test", arrivals=[arrival(0, "a"), arrival(1, "a")])
    transport = httpx.MockTransport(away)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        requests = await TraceSender(client, trace, "m", Pace()).run()
    assert [request.error for request in requests] == ["ConnectError", "ConnectError"]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ('{"error": {"code": "worker_lost", "message": "gone"}}', "worker_lost"),
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"usage": {"total_tokens": 3}}', "KeyError"),
    ],
)
def test_sender_reports_error_events_and_malformed_events(event: str, error: str) -> None:
    def odd(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n")

    async def run() -> str:
        trace = Trace(format="test", arrivals=[arrival(0)])
        transport = httpx.MockTransport(odd)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            (request,) = await TraceSender(client, trace, "m", Pace()).run()
        return request.error

    assert asyncio.run(run()) == error
