"""Unchanged clients of /v1/messages over a real socket: anthropic (sync and async), and requests
in the shape of Claude Code's."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from schemas.records import OutcomeKind, Request
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.answering import TEXTS, answering
from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.parsed_answers import (
    called,
    content,
    parsed_answer,
    parsing_gateway,
    prompt_of,
)
from tests.streams.gateway.samples import MODEL, events_of, frame, stream_end
from tests.waits import PATIENCE_S

TEXT = "".join(TEXTS)
TURNS: Any = [{"role": "user", "content": "where?"}]


@contextlib.asynccontextmanager
async def client_of(
    gateway: InProcessGateway, *, max_retries: int = 0
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serving(gateway) as url,
        anthropic.AsyncAnthropic(
            base_url=url, api_key="key", timeout=PATIENCE_S, max_retries=max_retries
        ) as client,
    ):
        yield client


async def test_anthropic_client_creates_and_continues() -> None:
    gateway = answering(api_keys=("key",))
    async with client_of(gateway) as client:
        first = await client.messages.create(model=MODEL, max_tokens=16, messages=TURNS)
        assert (first.role, first.stop_reason) == ("assistant", "end_turn")
        (block,) = first.content
        assert block.type == "text" and block.text == TEXT
        assert first._request_id == gateway.log.requests[0].request_id
        assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (3, 4)
        turns = [
            *TURNS,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": "and when?"},
        ]
        await client.messages.create(
            model=MODEL,
            max_tokens=16,
            messages=turns,
            system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            extra_body={"seed": 7},
        )
    assert gateway.log.requests[1].turn == 1 and gateway.log.requests[1].sampling.seed == 7


async def test_anthropic_stream_helper_builds_whole_message() -> None:
    async with client_of(answering()) as client:
        async with client.messages.stream(model=MODEL, max_tokens=16, messages=TURNS) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == TEXT == final.content[0].text  # type: ignore[union-attr]  # text
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 5)
        assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (3, 4)
        events = await client.messages.create(
            model=MODEL, max_tokens=16, messages=TURNS, stream=True
        )
        kinds = [event.type async for event in events]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_anthropic_client_counts_tokens() -> None:
    gateway = answering()
    async with client_of(gateway) as client:
        count = await client.messages.count_tokens(model=MODEL, messages=TURNS, system="be brief")
        assert count.input_tokens > 0
        beta = await client.beta.messages.count_tokens(
            model=MODEL, messages=TURNS, betas=["token-counting-2024-11-01"]
        )
        assert 0 < beta.input_tokens < count.input_tokens
    assert not gateway.log.requests


async def test_anthropic_client_lists_models() -> None:
    async with client_of(answering()) as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == [MODEL]
        assert (await client.models.retrieve(MODEL)).max_input_tokens == 512
        with pytest.raises(anthropic.NotFoundError, match="batches"):
            await client.messages.batches.list()


async def test_anthropic_client_raises_matching_errors() -> None:
    gateway = answering(api_keys=("key",))
    cases: list[tuple[type[anthropic.APIStatusError], dict[str, Any], str]] = [
        (anthropic.BadRequestError, {"max_tokens": 0}, "max_tokens"),
        (anthropic.NotFoundError, {"model": "other"}, "other"),
        (anthropic.BadRequestError, {"system": "word " * 4_000}, "prompt is too long"),
    ]
    async with client_of(gateway) as client:
        for kind, fields, text in cases:
            with pytest.raises(kind, match=text) as caught:
                call: Any = {"model": MODEL, "max_tokens": 16, "messages": TURNS, **fields}
                await client.messages.create(**call)
            assert caught.value.request_id and caught.value.type
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            stranger = client.with_options(api_key="none")
            await stranger.messages.create(model=MODEL, max_tokens=16, messages=TURNS)
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model=MODEL, max_tokens=0, messages=TURNS)
        assert (caught.value.type, caught.value.error_code) == (
            "invalid_request_error",
            "invalid_request",
        )


async def test_anthropic_client_retries_overload() -> None:
    gateway = answering()

    def refuse(request: Request) -> None:
        """The router sheds the first request, and answers the second."""
        is_first = len(gateway.log.requests) == 1
        kind = OutcomeKind.SHED if is_first else OutcomeKind.COMPLETED
        end = stream_end(request.request_id, ["a"], kind=kind)
        loop = asyncio.get_running_loop()
        gateway.log.hub.apply(frame(request.request_id, ["a"], end=end), loop.time())

    gateway.log.on_request = refuse
    async with client_of(gateway, max_retries=1) as client:
        whole = await client.messages.create(model=MODEL, max_tokens=16, messages=TURNS)
    assert whole.content and len(gateway.log.requests) == 2


async def test_anthropic_client_raises_error_within_stream() -> None:
    gateway = InProcessGateway()
    async with client_of(gateway) as client, asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(
            client.messages.create(model=MODEL, max_tokens=16, messages=TURNS, stream=True)
        )
        await gateway.log.wait_sent(1)
        (request,) = gateway.log.requests
        await gateway.log.push(frame(request.request_id, ["a"]))
        stream = await calling
        end = stream_end(request.request_id, ["a"], kind=OutcomeKind.EXPIRED)
        await gateway.log.push(frame(request.request_id, [], end=end))
        with pytest.raises(anthropic.APIStatusError, match="deadline"):
            [event async for event in stream]


async def test_anthropic_sync_client_streams() -> None:
    async with serving(answering()) as url:

        def talk() -> str:
            with anthropic.Anthropic(
                base_url=url, auth_token="token", timeout=PATIENCE_S
            ) as client:
                call: Any = {"model": MODEL, "max_tokens": 16, "messages": TURNS}
                with client.messages.stream(**call) as stream:
                    return "".join(stream.text_stream)

        assert await asyncio.to_thread(talk) == TEXT


TOOLS: Any = [
    {"name": "read", "description": "Read a file", "input_schema": {"type": "object"}},
    {"name": "list", "input_schema": {"type": "object", "properties": {}}},
]


async def test_anthropic_client_loops_over_tools() -> None:
    """An agent's turns: the answer goes back as it came, with the results of its calls."""
    gateway = parsing_gateway()
    turns: list[Any] = [{"role": "user", "content": "which files?"}]
    async with client_of(gateway) as client:
        for i in range(3):
            async with client.messages.stream(
                model=MODEL,
                max_tokens=64,
                messages=turns,
                tools=TOOLS,
                thinking={"type": "enabled", "budget_tokens": 32},
            ) as stream:
                final = await stream.get_final_message()
            assert final.stop_reason == "tool_use"
            calls = [block for block in final.content if block.type == "tool_use"]
            assert [call.name for call in calls] == ["read", "list"]
            assert [call.input for call in calls] == [{"path": "a"}, {}]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": f"result {i}"}
                for call in calls
            ]
            turns += [final.to_param(), {"role": "user", "content": results}]
    assert [request.turn for request in gateway.log.requests] == [0, 1, 2]


async def test_anthropic_tool_runner_calls_functions() -> None:
    """The runner of the package calls a function until the answer has no call."""
    gateway = parsing_gateway([[called("", 0, "weather"), called('{"place": "pier"}')]])

    @anthropic.beta_async_tool
    async def weather(place: str) -> str:
        """Tell the weather at a place."""
        gateway.log.on_request = parsed_answer(gateway, [[content("Fog at the pier.")]])
        return f"fog at {place}"

    async with client_of(gateway) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=64, tools=[weather], messages=TURNS
        )
        final = await runner.until_done()
    assert final.model_dump()["content"][0]["text"] == "Fog at the pier."
    assert len(gateway.log.requests) == 2


def claude_code_body(*turns: Any, **fields: Any) -> dict[str, Any]:
    """A body with the fields and marks that Claude Code sends."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    user = {"device_id": "d" * 64, "account_uuid": "", "session_id": "2b1f"}
    return {
        "model": MODEL,
        "max_tokens": 32_000,
        "messages": list(turns),
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"},
            {"type": "text", "text": "You are a coding agent.", **mark},
            {"type": "text", "text": "Working directory: /src", **mark},
        ],
        "metadata": {"user_id": json.dumps(user)},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
        **fields,
    }


HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1 (external, cli)",
    "authorization": "Bearer key",
    "x-stainless-retry-count": "0",
}


async def send(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> list[Any]:
    response = await client.post("/v1/messages?beta=true", json=body, headers=HEADERS | headers)
    assert response.status_code == 200, response.text
    return events_of(response.text)


async def test_calls_of_claude_code_are_answered() -> None:
    """Without tools: the title of a session, and its probe of the quota."""
    gateway = answering(api_keys=("key",))
    reminder = "<system-reminder>\nToday is Friday.\n</system-reminder>"
    turn = {
        "role": "user",
        "content": [{"type": "text", "text": reminder}, {"type": "text", "text": "hello"}],
    }
    async with serving(gateway) as url, http_client(url) as client:
        session = {"x-claude-code-session-id": "2b1f"}
        events = await send(client, claude_code_body(turn), **session)
        assert events[-1] == {"type": "message_stop"}
        prefill = {"role": "assistant", "content": "{"}
        await send(client, claude_code_body(turn, prefill, temperature=0, max_tokens=512))
        probe = {"role": "user", "content": "quota"}
        await send(client, claude_code_body(probe, max_tokens=1))
    assert gateway.log.requests[0].session_id == "2b1f"
    assert gateway.log.requests[2].sampling.max_tokens == 1


async def test_loop_of_claude_code_is_answered() -> None:
    """With tools and thinking: results, one of them an error, and a reminder beside them."""
    gateway = parsing_gateway()
    tools = [
        {
            "name": name,
            "description": "What it does",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"file_path": {"type": "string"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        }
        for name in ("Bash", "Read", "mcp__files__list")
    ]
    thinking = {"type": "adaptive"}
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "fix it"}]}]
    async with serving(gateway) as url, http_client(url) as client:
        await send(client, claude_code_body(*turns, tools=tools, thinking=thinking))
        mark = {"cache_control": {"type": "ephemeral"}}
        calls = [
            {"type": "tool_use", "id": f"toolu_{i}", "name": "Read", "input": {"file_path": "a"}}
            for i in range(2)
        ]
        thought = {"type": "thinking", "thinking": "I read.", "signature": "EqQBCg=="}
        turns.append({"role": "assistant", "content": [thought, *calls]})
        error = "<tool_use_error>File does not exist.</tool_use_error>"
        results = [
            {"type": "tool_result", "tool_use_id": "toolu_0", "content": "1\timport os"},
            {"tool_use_id": "toolu_1", "type": "tool_result", "content": error, "is_error": True},
            {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>", **mark},
        ]
        turns.append({"role": "user", "content": results})
        body = claude_code_body(*turns, tools=tools, thinking=thinking)
        events = await send(client, body)
        counted = await client.post(
            "/v1/messages/count_tokens?beta=true", json=body, headers=HEADERS
        )
    names = [e["content_block"].get("name") for e in events if e["type"] == "content_block_start"]
    assert names == [None, None, "read", "list"]
    request = gateway.log.requests[1]
    assert request.parsing is not None and json.loads(request.parsing.tools)[2]
    prompt = prompt_of(gateway)
    assert prompt.index("import os") < prompt.index(error) < prompt.index("Be careful.")
    assert "Error: " not in prompt, "the text says so itself"
    assert counted.json()["input_tokens"] == len(unpack_tokens(request.prompt_tokens))
