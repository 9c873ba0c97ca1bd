"""Chats in the shapes that coding agents send: OpenCode (over Vercel's `ai`) and Cline (over
`openai` for Node). Those of Claude Code and of Codex are tested with messages and responses."""

import json
from typing import Any

import pytest

from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.parsed_answers import parsing_gateway, prompt_of
from tests.streams.gateway.samples import MODEL, events_of

CONTEXT_TOKENS = 512  # of the model of `InProcessGateway`
READ_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "filePath": {"type": "string", "description": "The file's path"},
        "offset": {"type": "number"},
    },
    "required": ["filePath"],
    "additionalProperties": False,
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "description": "What it does.", "parameters": READ_SCHEMA}
    return {"type": "function", "function": {**function, **fields}}


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def opencode_body(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A body of OpenCode's with the model's limits unset: it asks for 32 000 tokens."""
    return {
        "model": MODEL,
        "max_tokens": 32_000,
        "temperature": 0.55,
        "top_p": 1,
        "messages": [
            {"role": "system", "content": "You are a coding agent.\nWorking directory: /src"},
            *turns,
        ],
        "tools": [tool("bash"), tool("read"), tool("todowrite")],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


OPENCODE = {"user-agent": "opencode/1.2 ai-sdk/provider-utils/4", "authorization": "Bearer x"}


async def streamed(
    gateway: InProcessGateway, body: dict[str, Any], headers: dict[str, str]
) -> list[Any]:
    """Return the events of a stream, which end with the usage and [DONE]."""
    async with serving(gateway) as url, http_client(url) as client:
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    return events_of(response.text.removesuffix("data: [DONE]\n\n"))


async def test_loop_of_opencode_is_answered() -> None:
    """Its repair of a call is a call of a tool `invalid`, which its tools do not have."""
    gateway = parsing_gateway()
    mark = {"cache_control": {"type": "ephemeral"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "fix it"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I read.",
            "tool_calls": [
                tool_call("call_a", "read", {"filePath": "/src/a.py"}),
                tool_call("call_b", "invalid", {"tool": "Reed", "error": "no such tool"}),
            ],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "<file>\n00001| import os\n</file>"},
        {"role": "tool", "tool_call_id": "call_b", "content": "The arguments are invalid.", **mark},
    ]
    events = await streamed(gateway, opencode_body(*turns, reasoning_effort="high"), OPENCODE)
    calls = [
        call
        for event in events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["read", "list"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
    (request,) = gateway.log.requests
    prompt_tokens = len(unpack_tokens(request.prompt_tokens))
    assert prompt_tokens + request.sampling.max_tokens == CONTEXT_TOKENS
    assert request.parsing is not None and len(json.loads(request.parsing.tools)) == 3
    prompt = prompt_of(gateway)
    assert prompt.index("import os") < prompt.index("The arguments are invalid.")


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
async def test_summary_and_title_of_opencode_are_answered(fields: dict[str, Any]) -> None:
    """They have a conversation with calls, and call nothing."""
    gateway = parsing_gateway([])
    body = opencode_body(
        {"role": "user", "content": [{"type": "text", "text": "fix it"}]},
        {"role": "assistant", "content": None, "tool_calls": [tool_call("c", "read", {})]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "Summarize the conversation."},
        **{"tool_choice": None, **fields},
    )
    await streamed(gateway, body, OPENCODE)
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None and not parsing.tools


async def test_loop_of_cline_is_answered() -> None:
    """Its turns have lists of texts, and beside a result what the user's editor shows."""
    gateway = parsing_gateway()
    details = [{"type": "reasoning.text", "text": "I read.", "format": "unknown", "index": 0}]
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<task>\nfix it\n</task>"},
                    {
                        "type": "text",
                        "text": "<environment_details>\n# Tabs\n</environment_details>",
                    },
                ],
            },
            {
                "role": "assistant",
                "content": "I read the file.",
                "tool_calls": [tool_call("call_0", "read_file", {"path": "a.py"})],
                "reasoning_details": details,
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "import os"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "<environment_details>\n# Time\n"}],
            },
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [tool("read_file", strict=False), tool("attempt_completion", strict=False)],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }
    headers = {"HTTP-Referer": "https://cline.bot", "X-Title": "Cline", "x-stainless-lang": "js"}
    events = await streamed(gateway, body, headers)
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    (request,) = gateway.log.requests
    assert request.parsing is not None and not request.parsing.parallel_tool_calls
    prompt = prompt_of(gateway)
    assert prompt.index("# Tabs") < prompt.index("import os") < prompt.index("# Time")
