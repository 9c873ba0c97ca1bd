"""The documentation."""

import re

from tests.streams.gateway.in_process import InProcessGateway


async def test_openapi_document_names_every_endpoint() -> None:
    async with InProcessGateway().client() as client:
        document = (await client.get("/openapi.json")).json()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
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


async def test_docs_page_loads_nothing_from_elsewhere() -> None:
    """The page can be saved and works without the internet."""
    async with InProcessGateway().client() as client:
        document = (await client.get("/openapi.json")).text
        answer = await client.get("/docs")
        page, headers = answer.text, answer.headers
        assert int(headers["content-length"]) < 1_000_000, "compressed"
        revalidation = await client.get("/docs", headers={"if-none-match": headers["etag"]})
        assert (revalidation.status_code, revalidation.content) == (304, b"")
        plain = await client.get("/docs", headers={"accept-encoding": "identity"})
        assert plain.text == page and "content-encoding" not in plain.headers
        assert (await client.get("/redoc")).status_code == 404, "it would come from elsewhere"
    elements = re.sub(r"(?s)<(style|script)>.*?</\1>", "", page)
    assert "<script" not in elements and "src=" not in elements and "http" not in elements
    style, program, start = re.findall(r"(?s)<(?:style|script)>(.*?)</(?:style|script)>", page)
    assert len(program) > 1_000_000 and not re.search(r"@import|url\((?!.?data:)", style)
    assert document[:40] in start.replace(": ", ":").replace(", ", ",")
    assert not re.search(r"<!--|</?script", program + start), "it would end the element"
