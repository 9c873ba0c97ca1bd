"""Gateways of tests that answer calls of /v1/responses with reasoning and tool calls."""

from typing import Any

from tests.streams.gateway.answering import RESPONSE, body, checked
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.parsed_answers import (
    PARSERS,
    THINKS_AND_CALLS,
    Pieces,
    called,
    content,
    parsed_answer,
)

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}
LIST = {"type": "function", "name": "list"}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
TOOLS = [READ, LIST, PATCH]
SEARCH = {"type": "file_search", "vector_store_ids": ["handbook"]}
PATCHES: Pieces = (
    [content("Now.")],
    [called('{"input": "a', 0, "patch")],
    [called("\\", 0)],
    [called('n\\"b', 0)],
    [called('"}', 0)],
)


def beside(gateway: InProcessGateway, pieces: Pieces = THINKS_AND_CALLS) -> InProcessGateway:
    """Another gateway of the same deployment, with other answers on the same log."""
    second_gateway = InProcessGateway(partition=1, max_model_len=2_048, parsers=PARSERS)
    second_gateway.log.frames = gateway.log.frames
    second_gateway.state.responses = second_gateway.log.responses = gateway.log.responses
    second_gateway.log.on_request = parsed_answer(second_gateway, pieces)
    return second_gateway


def answering(
    pieces: Pieces = THINKS_AND_CALLS, *, unserved_tools: str = "ignore", **end: Any
) -> InProcessGateway:
    gateway = InProcessGateway(max_model_len=2_048, parsers=PARSERS, unserved_tools=unserved_tools)
    end = {"finish_reason": "tool_calls", "reasoning_tokens": 3} | end
    gateway.log.on_request = parsed_answer(gateway, pieces, **end)
    return gateway


async def created(gateway: InProcessGateway, content: Any = "hello", **fields: Any) -> Any:
    whole_body = {**body(content), "tools": TOOLS, **fields}
    status, response = await call(gateway, whole_body, PATH)
    assert status == 200, response
    RESPONSE.validate_python(response)
    return response


async def streamed(gateway: InProcessGateway, **fields: Any) -> list[Any]:
    async with gateway.client() as client:
        answer = await client.post(PATH, json={**body(stream=True), "tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    return checked(answer.text)
