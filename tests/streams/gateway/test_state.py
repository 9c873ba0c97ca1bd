"""What a gateway keeps beyond a call, and how it ends what nobody else ends."""

import asyncio

import orjson

from tests.streams.gateway.in_process import (
    InProcessGateway,
    call,
)
from tests.streams.gateway.samples import MODEL, chat, events_of, frame, stream_end
from tests.streams.gateway.streamed_call import (
    TEXTS,
    WITH_IDS,
    accepted_requests,
    streamed_call,
)
from tests.waits import until


async def test_cancellation_record_names_tenant() -> None:
    """A tenant can cancel only its own requests."""
    gateway = InProcessGateway(api_keys=("alice", "bob"))

    def headers(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}"}

    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        call = client.post("/v1/chat/completions", json=chat(), headers=headers("alice"))
        task = tasks.create_task(call)
        (request,) = await accepted_requests(gateway)
        path = f"/v1/requests/{request.request_id}"
        elsewhere = headers("bob") | {"X-Session-Id": request.session_id}
        assert (await client.delete(path, headers=elsewhere)).status_code == 202
        assert (await client.delete(path, headers=headers("alice"))).status_code == 200
        gateway.state.calls.sweep(0.0, 2**62)
        await task
    bobs, *alices = gateway.log.cancellations
    assert bobs.tenant not in ("", request.tenant)
    assert {cancellation.tenant for cancellation in alices} == {request.tenant}
    assert request.cache_scope == request.tenant, "what it begins with is nobody else's to see"


async def test_cache_salt_divides_prefix_cache_of_tenant() -> None:
    """As in vLLM, every call that has a prompt accepts a salt."""
    gateway = InProcessGateway(api_keys=("alice",))
    gateway.answer_with("a")
    calls = {
        "/v1/chat/completions": chat(),
        "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 1},
        "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 16},
    }
    async with gateway.client() as client:
        client.headers["authorization"] = "Bearer alice"
        for path, body in calls.items():
            for salt in ("x", "y", None):
                answer = await client.post(path, json=body | {"cache_salt": salt})
                assert answer.status_code == 200, answer.text
    scopes = [request.cache_scope for request in gateway.log.requests]
    (tenant,) = {request.tenant for request in gateway.log.requests}
    assert scopes == [f"{tenant}/x", f"{tenant}/y", tenant] * len(calls)


async def test_gateway_limits_answers_in_flight() -> None:
    gateway = InProcessGateway(in_flight_max=2)
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        active_call = tasks.create_task(client.post("/v1/chat/completions", json=chat(n=2)))
        await gateway.log.wait_sent(2)
        refused = await client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_requests"
        for request in gateway.log.requests:
            await gateway.log.push(
                frame(request.request_id, ["a"], end=stream_end(request.request_id, "a"))
            )
        assert (await active_call).status_code == 200
        gateway.answer_with("a")
        retry = await client.post("/v1/chat/completions", json=chat())
        assert retry.status_code == 200
        never = await client.post("/v1/chat/completions", json=chat(n=3))
        assert never.status_code == 400, "no use in trying again"
        assert "n: expected at most 2 answers" in never.json()["error"]["message"]


async def test_draining_gateway_refuses_new_calls() -> None:
    gateway = InProcessGateway()
    gateway.state.calls.draining = True
    status, answer = await call(gateway, chat())
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    async with gateway.client() as client:
        assert (await client.get("/health/ready")).json()["reasons"] == ["shutting down"]


async def test_gateway_sends_keepalive_on_silent_resumable_stream() -> None:
    """Other streams get none: readers of OpenAI's streams may know no comments."""
    gateway = InProcessGateway(keepalive_ms=1_000)
    async with (
        streamed_call(gateway, chat(stream=True), **WITH_IDS) as stream,
        streamed_call(gateway, chat(stream=True)) as plain,
    ):
        await accepted_requests(gateway, 2)
        arrived_s = max(call.arrived_s for call in gateway.state.calls.hub.calls())
        gateway.state.calls.sweep(arrived_s + 0.9, 0)
        gateway.state.calls.sweep(arrived_s + 1.1, 0)
        gateway.state.calls.sweep(arrived_s + 1.2, 0)
        await until(lambda: stream.text == ": keep-alive\n")
        assert (stream.status, plain.status) == (200, 0)


async def test_gateway_enforces_deadline_after_grace() -> None:
    gateway = InProcessGateway()
    async with (
        streamed_call(gateway, chat()) as whole,
        streamed_call(gateway, chat(stream=True)) as stream,
    ):
        requests = await accepted_requests(gateway, 2)
        for call in gateway.state.calls.hub.calls():
            if not call.waits_for_end:
                await gateway.log.push(frame(call.streams[0].request_id, ["a"]))
        await until(lambda: bool(stream.writes))
        gateway.state.calls.sweep(0.0, max(r.deadline_ms for r in requests) + 2_001)
        await until(lambda: whole.over and stream.over)
        await gateway.log.wait_sent(4)
    assert whole.status == 504
    assert orjson.loads(whole.text)["error"]["code"] == "deadline_exceeded"
    assert events_of(stream.text)[-1]["error"]["code"] == "deadline_exceeded"
    assert len(gateway.log.cancellations) == 2


async def test_gateway_fails_stream_with_lost_tokens() -> None:
    gateway = InProcessGateway(gap_ms=1_000)
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5))
        gateway.state.calls.sweep(1.0, 0)
        gateway.state.calls.sweep(1.9, 0)
        assert not stream.over
        gateway.state.calls.sweep(2.1, 0)
        await until(lambda: stream.over)
        await gateway.log.wait_sent(2)
    assert stream.status == 500
    assert "were lost" in orjson.loads(stream.text)["error"]["message"]
    assert gateway.log.cancellations
