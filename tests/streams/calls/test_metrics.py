"""What /metrics shows."""

from schemas.fleet import FleetView
from schemas.records import OutcomeKind, Role, Wanted, WantedPool
from streams.calls.metrics import Metrics
from streams.log.clock import wall_ms
from tests.streams.gateway.endpoints.several_models import LAW, NAMES, gateway_of_three
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat


async def test_metrics_count_requests_tokens_and_frames() -> None:
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
        'trivium_gateway_first_token_seconds_count{model="test-model"} 1.0',
        'trivium_gateway_first_token_seconds_bucket{le="+Inf",model="test-model"} 1.0',
        'trivium_gateway_answers_total{model="test-model",outcome="completed"} 1.0',
        'trivium_gateway_answer_tokens_total{model="test-model"} 2.0',
        "trivium_gateway_in_flight 0.0",
    ):
        assert line in text


async def test_metrics_of_models_have_names_of_settings_only() -> None:
    """Whatever callers name; an adapter counts by its own name."""
    gateway = gateway_of_three()
    gateway.answer_with("a", kind=OutcomeKind.FAILED)
    for name in (*NAMES, f"{LAW.name}@docs", "other", "x" * 300):
        await call(gateway, {**chat(), "model": name})
    text = gateway.state.metrics.render().decode()
    for name, count in ((MODEL, 1), (LAW.name, 2), ("small", 1)):
        assert f'answers_total{{model="{name}",outcome="failed"}} {count}.0' in text
    assert {
        line.split('model="')[1].split('"')[0] for line in text.splitlines() if "model=" in line
    } == {*NAMES}


def test_metrics_show_scaling_target_when_published() -> None:
    metrics = Metrics()
    assert "trivium_workers" not in metrics.render().decode()
    pool = WantedPool(role=Role.DECODE, model="m", present=2, workers=3, work=2.4, why="")
    view = FleetView()
    view.scaling_target = Wanted(written_by="up", at_ms=wall_ms(), pools=[pool])
    metrics.fleet = lambda: view
    text = metrics.render().decode()
    assert 'trivium_workers_wanted{model="m",pool="decode"} 3.0' in text
    assert 'trivium_workers_present{model="m",pool="decode"} 2.0' in text
