"""Limits, keys, health, metrics and the pages beside the path."""

import asyncio
from typing import Any

import pytest

from schemas.errors import BrokerUnavailable, ConfigError, NotReady
from streams.gateway.config import GatewaySettings
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, ended, frame
from tests.waiting import until

JSON = {"content-type": "application/json"}


async def test_bodies_that_are_too_large_with_and_without_their_length() -> None:
    gateway = InProcessGateway(body_bytes_max=100)

    async def pieces() -> Any:
        for _ in range(10):
            yield b" " * 20

    async with gateway.client() as client:
        announced = await client.post("/v1/chat/completions", content=b" " * 101, headers=JSON)
        chunked = await client.post("/v1/chat/completions", content=pieces(), headers=JSON)
        tokenize = await client.post("/tokenize", content=b" " * 101, headers=JSON)
    for response in (announced, chunked, tokenize):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


async def test_the_limit_of_answers_in_flight() -> None:
    gateway = InProcessGateway(in_flight_max=2)
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        held = tasks.create_task(client.post("/v1/chat/completions", json=chat(n=2)))
        await gateway.log.wait_sent(2)
        refused = await client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_requests"
        for request in gateway.log.requests:
            await gateway.log.push(
                frame(request.request_id, ["a"], end=ended(request.request_id, "a"))
            )
        assert (await held).status_code == 200
        gateway.answer_with("a")
        again = await client.post("/v1/chat/completions", json=chat())
        assert again.status_code == 200
        never = await client.post("/v1/chat/completions", json=chat(n=3))
        assert never.status_code == 400, "no use in trying again"
        assert "n: expected at most 2 answers" in never.json()["error"]["message"]


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (BrokerUnavailable("no broker"), "broker_unavailable"),
        (NotReady("no worker"), "not_ready"),
    ],
)
async def test_without_a_broker_or_worker_calls_are_refused_at_once(
    trouble: Any, code: str
) -> None:
    gateway = InProcessGateway()
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


async def test_a_request_that_is_not_acknowledged_was_not_accepted() -> None:
    gateway = InProcessGateway()
    gateway.log.hold_acks = asyncio.Event()
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.post("/v1/chat/completions", json=chat()))
        await until(lambda: gateway.state.in_flight == 1)
        gateway.log.trouble = BrokerUnavailable("it went away")
        gateway.log.hold_acks.set()
        response = await task
    assert response.status_code == 503
    assert gateway.state.in_flight == 0
    assert len(gateway.log.hub) == 0


async def test_draining_refuses_new_calls() -> None:
    gateway = InProcessGateway()
    gateway.state.draining = True
    status, answer = await call(gateway, chat())
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    async with gateway.client() as client:
        assert (await client.get("/health/ready")).json()["reasons"] == ["shutting down"]


async def test_keys() -> None:
    gateway = InProcessGateway(api_keys=("secret", "other"))
    gateway.answer_with("ok")
    for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic secret"}):
        status, answer = await call(gateway, chat(), **headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert answer["error"]["type"] == "authentication_error"
    for key in ("secret", "other"):
        assert (await call(gateway, chat(), authorization=f"Bearer {key}"))[0] == 200
    first, second = gateway.log.requests
    assert first.tenant != second.tenant
    assert "secret" not in first.tenant
    async with gateway.client() as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.delete("/v1/requests/r1")).status_code == 401
        assert (await client.get("/v1/requests/r1/events")).status_code == 401
        assert (await client.get("/health/live")).status_code == 200


async def test_models_tokenize_and_what_is_not_there() -> None:
    async with InProcessGateway().client() as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert (await client.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        missing = await client.get("/v1/models/a/b")
        assert missing.json()["error"]["code"] == "model_not_found"
        found = await client.post("/tokenize", json={**chat("hello"), "return_token_strs": True})
        assert found.json() == {
            "count": 5,
            "max_model_len": 512,
            "tokens": [0, 3, 275, 1, 4],
            "token_strs": ["<s>", "<|user|>", "hello", "</s>", "<|assistant|>"],
        }
        both = await client.post("/tokenize", json={**chat(), "prompt": "x"})
        assert both.status_code == 400
        nowhere = await client.get("/v2/chat")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
        wrong = await client.put("/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        for response in (missing, found, both, nowhere, wrong):
            assert response.headers["x-request-id"].startswith("r")


async def test_a_bug_is_a_500_with_an_openai_body() -> None:
    gateway = InProcessGateway()

    def fail() -> list[str]:
        raise RuntimeError("a bug")

    gateway.log.problems = fail  # type: ignore[method-assign]  # a bug, put there
    async with gateway.client() as client:
        response = await client.get("/health/ready")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "a bug" not in response.text


async def test_the_documentation_names_every_endpoint() -> None:
    async with InProcessGateway().client() as client:
        document = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v1/requests/{request_id}",
        "/v1/requests/{request_id}/events",
    } <= set(document["paths"])
    body = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "response_format"} <= set(body)


async def test_metrics() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a", "b")
    await call(gateway, chat())
    await call(gateway, chat(temperature=9))
    async with gateway.client() as client:
        text = (await client.get("/metrics")).text
    for line in (
        'trivium_gateway_requests_total{endpoint="chat",outcome="completed"} 1.0',
        'trivium_gateway_requests_total{endpoint="chat",outcome="invalid_request"} 1.0',
        "trivium_gateway_tokens_total 2.0",
        "trivium_gateway_frames_total 1.0",
        "trivium_gateway_first_token_seconds_count 1.0",
        "trivium_gateway_in_flight 0.0",
    ):
        assert line in text


@pytest.mark.parametrize("named", ["interactive", "standard"])
async def test_a_class_is_capped_by_the_settings(named: str) -> None:
    """By header or field; without either the default holds (issue 10, 18)."""
    gateway = InProcessGateway(priority="batch", priority_max="standard")
    gateway.answer_with("ok")
    expected = 200 if named == "standard" else 400
    assert (await call(gateway, chat(), x_priority=named))[0] == expected
    assert (await call(gateway, chat(priority=named)))[0] == expected
    assert (await call(gateway, chat()))[0] == 200
    assert gateway.log.requests[-1].priority == "batch"


async def test_a_deadline_is_capped_by_the_settings() -> None:
    """Whatever the client asks for (issue 10, 18)."""
    gateway = InProcessGateway(deadline_ms=1_000, deadline_ms_max=2_000)
    gateway.answer_with("ok")
    for asked_ms, expected in ((2_000, 200), (2_001, 400)):
        assert (await call(gateway, chat(), x_deadline_ms=str(asked_ms)))[0] == expected
    (request,) = gateway.log.requests
    assert request.deadline_ms == request.arrived_ms + 2_000


def test_the_default_class_is_within_the_cap() -> None:
    """Checked at start (issue 10, 18)."""
    with pytest.raises(ConfigError, match="priority: expected at most priority_max=batch"):
        GatewaySettings(priority_max="batch")
