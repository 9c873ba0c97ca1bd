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
from tests.virtual import virtual
from tests.waiting import pass_time

ANSWER_S = 1.0


class Gateway(httpx.AsyncBaseTransport):
    """Answers each call after a second, in three chunks of a quarter of it; some it refuses."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()
        self.asked: list[tuple[float, dict[str, Any], httpx.Headers]] = []
        self.under_way = self.most = 0
        self.refuses: set[int] = set()
        self.breaks: set[int] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        number = len(self.asked)
        self.asked.append((round(time.monotonic() - self.begin_s, 3), body, request.headers))
        if number in self.refuses:
            return httpx.Response(429, json={"error": {"code": "queue_full", "message": "no"}})
        return httpx.Response(200, content=self._answer(len(body["prompt"]), number))

    async def _answer(self, prompt_tokens: int, number: int) -> AsyncIterator[bytes]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
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
    """A request of 4 tokens."""
    return Arrival(at_ms=at_ms, prompt_tokens=4, output_tokens=3, session_id=session_id, **changes)


async def sent_by(gateway: Gateway, pace: Pace, *arrivals: Arrival) -> list[SentRequest]:
    """All of them."""
    trace = Trace(format="test", arrivals=arrivals)
    async with httpx.AsyncClient(transport=gateway, base_url="http://gateway") as client:
        return await TraceSender(client, trace, "m", pace).run()


def times(gateway: Gateway) -> list[float]:
    """When each call came, in s."""
    return [at_s for at_s, _, _ in gateway.asked]


@virtual
async def test_requests_come_at_the_traces_times_or_so_many_times_faster() -> None:
    """The first one goes at once."""
    gateway = Gateway()
    sent = await sent_by(gateway, Pace(), *(arrival(at_ms) for at_ms in (9_000, 9_400, 12_000)))
    assert times(gateway) == [0.0, 0.4, 3.0]
    assert all(each.is_scheduled for each in sent)
    gateway = Gateway()
    await sent_by(gateway, Pace(speed=10), *(arrival(at_ms) for at_ms in (9_000, 9_400, 12_000)))
    assert times(gateway) == [0.0, 0.04, 0.3]


@virtual
async def test_a_turn_waits_for_the_end_of_the_one_before() -> None:
    gateway = Gateway()
    turns = arrival(0, "a"), arrival(100, "a"), arrival(200, "b"), arrival(5_000, "a")
    sent = await sent_by(gateway, Pace(), *turns)
    assert times(gateway) == [0.0, 0.2, 1.0, 5.0]
    assert [each.is_scheduled for each in sent] == [True, False, True, False]
    ids = [headers["x-session-id"] for _, _, headers in gateway.asked]
    assert ids[0] == ids[2] == ids[3] != ids[1]


@virtual
async def test_delays_and_dispatches_are_kept() -> None:
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
async def test_max_keeps_only_the_order_of_turns() -> None:
    gateway = Gateway()
    turns = arrival(0, "a"), arrival(60_000, "b"), arrival(90_000, "a")
    await sent_by(gateway, Pace(speed=math.inf), *turns)
    assert times(gateway) == [0.0, 0.0, 1.0]


@virtual
async def test_a_closed_loop_has_so_many_under_way() -> None:
    """A turn that waits takes no place."""
    gateway = Gateway()
    first = [arrival(0, "a"), arrival(1, "a"), arrival(2, "a")]
    others = [arrival(3 + number) for number in range(4)]
    await sent_by(gateway, Pace(speed=math.inf, in_flight=2), *first, *others)
    assert gateway.most == 2
    assert times(gateway) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]


@virtual
async def test_an_answer_is_noted_as_it_came() -> None:
    gateway = Gateway()
    (found,) = await sent_by(gateway, Pace(), arrival(0, priority="batch"))
    assert [round(at_s - found.sent_s, 3) for at_s in found.chunks_s] == [0.5, 0.75, 1.0]
    assert (found.prompt_tokens, found.output_tokens, found.error) == (4, 3, "")
    _, body, headers = gateway.asked[0]
    assert (len(body["prompt"]), headers["x-priority"]) == (4, "batch")


@virtual
async def test_what_fails_is_told_and_what_waits_for_it_goes_on() -> None:
    gateway = Gateway()
    gateway.refuses, gateway.breaks = {0}, {1}
    sent = await sent_by(gateway, Pace(), *(arrival(at_ms, "a") for at_ms in (0, 1, 2)))
    assert [each.error for each in sent] == ["queue_full", "broken off", ""]


@virtual
async def test_a_gateway_that_is_away_is_an_error_of_each_request() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("away", request=request)

    trace = Trace(format="test", arrivals=[arrival(0, "a"), arrival(1, "a")])
    transport = httpx.MockTransport(away)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        sent = await TraceSender(client, trace, "m", Pace()).run()
    assert [each.error for each in sent] == ["ConnectError", "ConnectError"]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ('{"error": {"code": "worker_lost", "message": "gone"}}', "worker_lost"),
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"usage": {"total_tokens": 3}}', "KeyError"),
    ],
)
def test_an_event_that_is_an_error_or_none_is_told(event: str, error: str) -> None:
    def odd(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n")

    async def run() -> str:
        trace = Trace(format="test", arrivals=[arrival(0)])
        transport = httpx.MockTransport(odd)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            (sent,) = await TraceSender(client, trace, "m", Pace()).run()
        return sent.error

    assert asyncio.run(run()) == error
