"""From a call to requests on the log: what is accepted, what is refused, and what answers carry."""

import asyncio
from typing import Any

import pytest

from schemas.errors import BrokerUnavailable, NotReady
from schemas.records import OutcomeKind
from schemas.rules.sizes import REQUEST_BYTES_MAX
from tests.schemas.examples import TRACEPARENT
from tests.streams.gateway.in_process import (
    STARTED_MS,
    InProcessGateway,
    call,
    serving,
)
from tests.streams.gateway.raw_connection import HEAD, WHOLE, raw_connection
from tests.streams.gateway.samples import chat, completion, frame, stream_end
from tests.streams.gateway.streamed_call import (
    accepted_requests,
    streamed_call,
)
from tests.waits import until


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (BrokerUnavailable("no broker"), "broker_unavailable"),
        (NotReady("no worker"), "not_ready"),
    ],
)
async def test_gateway_returns_503_without_broker_or_worker(trouble: Any, code: str) -> None:
    gateway = InProcessGateway(wait_ms=50)
    gateway.log.trouble = trouble
    gateway.log.reasons = [trouble.message]
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=chat())
        assert (response.status_code, response.json()["error"]["code"]) == (503, code)
        assert response.headers["retry-after"] == "1"
        ready = await client.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json() == {"status": "not ready", "reasons": [trouble.message]}
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.parametrize("trouble", [BrokerUnavailable("no broker"), NotReady("no worker")])
async def test_gateway_waits_for_broker_or_worker_to_return(trouble: Any) -> None:
    """Clients that cannot retry would lose all calls of these seconds."""
    gateway = InProcessGateway(wait_ms=60_000)
    gateway.log.trouble, position, looks = trouble, gateway.log.reply_position, list[None]()

    def looked(model: str = "", adapter: str = "") -> tuple[int, int]:
        looks.append(None)
        return position(model, adapter)

    gateway.log.reply_position = looked  # type: ignore[method-assign]
    async with streamed_call(gateway, chat(stream=True)) as stream:
        await until(lambda: len(looks) > 1)
        gateway.log.trouble = None
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(
            frame(request.request_id, ["a"], end=stream_end(request.request_id, "a"))
        )
        await until(lambda: stream.over)
        assert stream.status == 200


async def test_gateway_returns_503_for_unacknowledged_request() -> None:
    gateway = InProcessGateway()
    gateway.log.hold_acks = asyncio.Event()
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.post("/v1/chat/completions", json=chat()))
        await until(lambda: gateway.state.calls.in_flight == 1)
        gateway.log.trouble = BrokerUnavailable("it went away")
        gateway.log.hold_acks.set()
        response = await task
    assert response.status_code == 503
    assert gateway.state.calls.in_flight == 0
    assert len(gateway.log.hub) == 0


async def test_full_gateway_refuses_before_reading_body() -> None:
    """The gateway does not ask for the body."""
    gateway = InProcessGateway(in_flight_max=1)
    async with serving(gateway) as url, raw_connection(url, WHOLE):
        await gateway.log.wait_sent(1)
        head = HEAD + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n"
        async with raw_connection(url, head) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize(
    "value", [b"t", TRACEPARENT[:-1], b"f" * 4_000], ids=["t", "short", "long"]
)
async def test_gateway_forwards_only_w3c_traceparents(value: bytes) -> None:
    """No unchecked header of a client reaches a record."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    for trace in (value, TRACEPARENT):
        assert (await call(gateway, chat(), traceparent=trace.decode()))[0] == 200
    assert gateway.log.headers[0] == []
    assert gateway.log.headers[1] == [("traceparent", TRACEPARENT)]


async def test_gateway_returns_413_for_request_over_record_limit() -> None:
    """A prompt that fits no record is an error of its caller."""
    gateway = InProcessGateway(max_model_len=4 << 20, body_bytes_max=64 << 20)
    gateway.answer_with("ok")
    prompt = [7] * (REQUEST_BYTES_MAX // 4)
    status, answer = await call(gateway, completion(prompt), "/v1/completions")
    assert (status, answer["error"]["code"]) == (413, "record_too_large")
    assert "shorten the prompt" in answer["error"]["message"]
    assert (await call(gateway, completion(prompt[:-1_000]), "/v1/completions"))[0] == 200


async def test_error_carries_request_id_only_for_logged_request() -> None:
    gateway = InProcessGateway()
    gateway.answer_with(kind=OutcomeKind.EXPIRED)
    async with gateway.client() as client:
        expired = await client.post("/v1/chat/completions", json=chat())
        refused = await client.post("/v1/chat/completions", json=chat(temperature=9))
    (request,) = gateway.log.requests
    assert expired.status_code == 504
    assert expired.headers["x-trivium-request-id"] == request.request_id
    assert refused.status_code == 400
    assert "x-trivium-request-id" not in refused.headers


@pytest.mark.parametrize("wish", ["cancel", "continue"])
async def test_request_record_names_gateway_and_disconnect_policy(wish: str) -> None:
    """Routers can thereby find the work of a lost gateway."""
    gateway = InProcessGateway()
    async with streamed_call(
        gateway, chat(stream=True, n=2), X_Trivium_On_Disconnect=wish
    ) as stream:
        for request in await accepted_requests(gateway, 2):
            assert (request.gateway_id, request.gateway_started_ms) == ("gateway-1", STARTED_MS)
            assert request.keeps_running == (wish == "continue")
        stream.hang_up()
