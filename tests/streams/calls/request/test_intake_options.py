"""What a call asks for besides its answer: class, deadline, weights, policy and orchestration."""

from typing import Any

import pytest

from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat


@pytest.mark.parametrize(
    ("header", "weights"),
    [
        (None, (-1.0, -1.0)),
        ("ttft=0.7,tpot=0.3", (0.7, 0.3)),
        (" TPOT = 2 , ttft=1e-1", (0.1, 2.0)),
        ("ttft=1", (1.0, 0.0)),
        ("ttft=0,tpot=1", (0.0, 1.0)),
    ],
)
async def test_request_record_has_latency_weights(
    header: str | None, weights: tuple[float, float]
) -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    headers = {} if header is None else {"x_trivium_weights": header}
    assert (await call(gateway, chat(n=2), **headers))[0] == 200
    assert [(r.w_ttft, r.w_tpot) for r in gateway.log.requests] == [weights] * 2


@pytest.mark.parametrize(
    "header",
    ["", "0.7", "ttft", "ttft=x", "ttft=-1", "ttft=nan", "ttft=inf", "ttft=0,tpot=0", "tbt=1"]
    + ["ttft=1,ttft=2", "ttft=1;tpot=2", "ttft=1,"],
)
async def test_intake_rejects_invalid_weights_with_expected_form(header: str) -> None:
    gateway = InProcessGateway()
    status, answer = await call(gateway, chat(), x_trivium_weights=header)
    assert status == 400
    assert answer["error"]["param"] == "x-trivium-weights"
    assert "expected ttft=NUMBER,tpot=NUMBER" in answer["error"]["message"]
    assert f"found {header!r}" in answer["error"]["message"]
    assert not gateway.log.sent_records


@pytest.mark.parametrize(
    ("field", "headers", "expected"),
    [
        (None, {}, ("", "")),
        (None, {"x_trivium_policy": " Replica "}, ("replica", "")),
        (None, {"x_trivium_orchestration": "concurrent"}, ("", "concurrent")),
        ({"policy": "static", "orchestration": "auto"}, {}, ("static", "auto")),
        ({"policy": "static"}, {"x_trivium_policy": "learned"}, ("static", "")),
    ],
)
async def test_request_record_has_policy_and_orchestration(
    field: Any, headers: dict[str, str], expected: tuple[str, str]
) -> None:
    """A header or a field selects policy and orchestration; the field takes precedence."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    assert (await call(gateway, chat(n=2, trivium=field), **headers))[0] == 200
    assert [(r.policy, r.orchestration) for r in gateway.log.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("field", "headers", "param"),
    [
        ({}, {"x_trivium_policy": "fastest"}, "x-trivium-policy"),
        ({}, {"x_trivium_orchestration": "none"}, "x-trivium-orchestration"),
        ({"policy": "fastest"}, {}, "trivium.policy"),
        ({"orchestration": ["auto"]}, {}, "trivium.orchestration"),
        ({"prefill": "first"}, {}, "trivium.prefill"),
        ("learned", {}, "trivium"),
    ],
)
async def test_intake_rejects_unknown_policy_and_orchestration(
    field: Any, headers: dict[str, str], param: str
) -> None:
    """A misspelt name is never replaced silently."""
    gateway = InProcessGateway()
    status, answer = await call(gateway, chat(trivium=field), **headers)
    assert (status, answer["error"]["param"]) == (400, param)
    assert not gateway.log.sent_records


@pytest.mark.parametrize("priority", ["interactive", "standard"])
async def test_settings_cap_priority_of_call(priority: str) -> None:
    """A header or a field sets the priority; without either the default applies."""
    gateway = InProcessGateway(priority="batch", priority_max="standard")
    gateway.answer_with("ok")
    expected = 200 if priority == "standard" else 400
    assert (await call(gateway, chat(), x_priority=priority))[0] == expected
    assert (await call(gateway, chat(priority=priority)))[0] == expected
    assert (await call(gateway, chat()))[0] == 200
    assert gateway.log.requests[-1].priority == "batch"


async def test_settings_cap_deadline_of_call() -> None:
    gateway = InProcessGateway(deadline_ms=1_000, deadline_ms_max=2_000)
    gateway.answer_with("ok")
    for asked_ms, expected in ((2_000, 200), (2_001, 400)):
        assert (await call(gateway, chat(), x_deadline_ms=str(asked_ms)))[0] == expected
    (request,) = gateway.log.requests
    assert request.deadline_ms == request.arrived_ms + 2_000
