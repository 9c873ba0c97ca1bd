"""What /metrics shows."""

from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat


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
