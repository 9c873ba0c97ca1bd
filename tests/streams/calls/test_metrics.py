"""What /metrics shows."""

from schemas.fleet import FleetView
from schemas.records import Role, Wanted, WantedPool
from streams.calls.metrics import Metrics
from streams.log.clock import wall_ms
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat


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
        "trivium_gateway_first_token_seconds_count 1.0",
        "trivium_gateway_in_flight 0.0",
    ):
        assert line in text


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
