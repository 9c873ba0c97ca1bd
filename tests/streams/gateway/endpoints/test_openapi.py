"""The documentation."""

from tests.streams.gateway.in_process import InProcessGateway


async def test_the_documentation_names_every_endpoint() -> None:
    async with InProcessGateway().client() as client:
        document = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/tokenize",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v1/requests/{request_id}",
        "/v1/requests/{request_id}/events",
    } <= set(document["paths"])
    body = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "response_format"} <= set(body)
