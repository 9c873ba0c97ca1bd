"""The stock client of Anthropic's API on a stack: simulated engines say what the prompt tells them,
and workers parse it with vLLM's own parsers."""

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest

from infra.stack.launcher import Stack
from tests.conftest import _fresh_topics
from tests.e2e.harness import met, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.streams.gateway.in_process import http_client
from tests.streams.gateway.samples import events_of
from tests.waits import PATIENCE_S
from workers.llm.sim.settings import SCRIPT_MARKS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
TOOLS: Any = [
    {
        "name": "read",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]
THINKING: Any = {"type": "enabled", "budget_tokens": 1_024}


def question_for(text: str) -> str:
    """A question whose answer is this text."""
    return f"Say {SCRIPT_MARKS[0]}{text}{SCRIPT_MARKS[1]}"


def call_of(path: str) -> str:
    """The text of a call, as models of Hermes' kind write it."""
    called = {"name": "read", "arguments": {"path": path}}
    return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"


@contextlib.asynccontextmanager
async def parsing_stack(
    bootstrap: str, folder: Path, step_ms: float, **plan: Any
) -> AsyncIterator[Stack]:
    """Replicas that parse what they say, and two gateways."""
    settings = sim_settings(await _fresh_topics(bootstrap), scripted=True, decode_step_ms=step_ms)
    model = replace(
        settings.model, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=4_096
    )
    async with stack(replace(settings, model=model), folder, gateways=2, **plan) as running_stack:
        yield running_stack


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("messages")
    async with parsing_stack(bootstrap, folder, 2.0, replica=1) as running_stack:
        yield running_stack


@pytest.fixture
async def client(running: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=running.gateway_urls[0], api_key="none", timeout=PATIENCE_S
    ) as stock:
        yield stock


async def test_agent_loops_over_calls(running: Stack, client: anthropic.AsyncAnthropic) -> None:
    """Thinking, two calls at once, their results, and an answer in text."""
    text = f"I look.\n</think>\n\nTwo files.\n{call_of('a')}\n{call_of('b')}"
    turns: list[Any] = [{"role": "user", "content": question_for(text)}]
    fields: Any = {"model": running.settings.model.served_name, "max_tokens": 400, "tools": TOOLS}
    whole = await client.messages.create(messages=turns, thinking=THINKING, **fields)
    async with client.messages.stream(messages=turns, thinking=THINKING, **fields) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == whole.stop_reason == "tool_use"
    for message in (whole, final):
        blocks = message.model_dump()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert blocks[0]["thinking"].strip() == "I look."
        assert blocks[1]["text"].strip() == "Two files."
        assert [block["input"] for block in blocks[2:]] == [{"path": "a"}, {"path": "b"}]
    assert final.usage.output_tokens_details is not None
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": question_for("Both are empty.")}
        for block in final.content
        if block.type == "tool_use"
    ]
    turns += [final.to_param(), {"role": "user", "content": results}]
    last = await client.messages.create(messages=turns, **fields)
    assert last.stop_reason == "end_turn"
    assert [block.model_dump()["text"] for block in last.content] == ["Both are empty."]


async def test_choice_of_tool_forces_call(running: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The engine's grammar makes any model call: one of the tools, or the tool that is named."""
    turns: Any = [{"role": "user", "content": "Which file?"}]
    tools = [*TOOLS, {"name": "close", "input_schema": {"type": "object", "properties": {}}}]
    choices: list[Any] = [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "close"},
    ]
    for choice in choices:
        whole = await client.messages.create(
            model=running.settings.model.served_name,
            max_tokens=600,
            messages=turns,
            tools=tools,
            tool_choice=choice,
        )
        calls = [block for block in whole.content if block.type == "tool_use"]
        assert len(calls) == 1 and whole.stop_reason == "tool_use"
        assert calls[0].name in ([choice["name"]] if "name" in choice else ["read", "close"])


async def test_call_resumes_at_other_gateway_after_each_event(running: Stack) -> None:
    path, ids = "/v1/messages", {"x-trivium-event-ids": "true"}
    text = f"Hm.\n</think>\n\nOne.\n{call_of('a/long/path')}"
    body = {
        "model": running.settings.model.served_name,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": question_for(text)}],
        "tools": TOOLS,
        "thinking": THINKING,
        "stream": True,
    }
    urls = running.gateway_urls
    async with http_client(urls[0]) as first, http_client(urls[1]) as second:
        whole = await first.post(path, json=body, headers=ids)
        assert whole.status_code == 200, whole.text
        blocks = [block for block in whole.text.split("\n\n") if block]
        event_ids = [line[4:] for line in whole.text.splitlines() if line.startswith("id: ")]
        assert len(event_ids) == len(blocks) > 10
        for i in range(0, len(event_ids) - 1, 3):
            event_id = event_ids[i]
            rest = await second.post(path, json={}, headers={"Last-Event-ID": event_id})
            joined = events_of("\n\n".join(blocks[: i + 1]) + "\n\n" + rest.text)
            assert spelled(joined) == spelled(events_of(whole.text))


@pytest.mark.slow  # four workers import vLLM's parsers
async def test_call_goes_on_after_death_of_its_worker(bootstrap: str, tmp_path: Path) -> None:
    """Killed within thinking, or within the arguments of a call, an answer has the same events."""
    plan = {"lease_ms": BRIEF_LEASE_MS, "replica": 2}
    async with parsing_stack(bootstrap, tmp_path, 10.0, **plan) as running:
        await kill_within_blocks(running)


async def kill_within_blocks(running: Stack) -> None:
    path = "/v1/messages"
    text = f"{'Hm, files. ' * 20}\n</think>\n\nOne.\n{call_of('a/long/path' * 20)}"
    body = {
        "model": running.settings.model.served_name,
        "max_tokens": 1_000,
        "messages": [{"role": "user", "content": question_for(text)}],
        "tools": TOOLS,
        "thinking": THINKING,
        "stream": True,
    }
    async with http_client(running.gateway_urls[0]) as client:
        whole = events_of((await client.post(path, json=body)).text)
        for delta in ("thinking_delta", "input_json_delta"):
            await running.wait_ready()
            await met(running)
            lines = list[str]()
            async with client.stream("POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    if delta in line and "killed" not in lines:
                        lines.append("killed")
                        worker_id = response.headers["x-trivium-decode-worker"]
                        await running.kill(worker_id, signal.SIGKILL)
            events = events_of("\n".join(lines))
            assert events[-2]["trivium"]["attempt"] > whole[-2]["trivium"]["attempt"] == 1
            assert anonymous(events) == anonymous(whole)


def anonymous(events: list[Any]) -> list[Any]:
    """What the events say, without what names the request or its workers."""
    fields = ("content_block", "delta", "index")
    event_parts = [{name: event.get(name) for name in fields} for event in spelled(events)]
    for event in event_parts:
        for part in (event["content_block"] or {}, event["delta"]):
            part |= dict.fromkeys({"id", "signature"} & part.keys(), "")
    return event_parts


def spelled(events: list[Any]) -> list[Any]:
    """The events, with neighbouring deltas of one block as one, however gateways group them."""
    spelled_events: list[Any] = []
    for event in events:
        delta = event.get("delta", {})
        last = spelled_events[-1] if spelled_events else {}
        if event["type"] == "content_block_delta" and (
            last.get("delta", {}).get("type") == delta["type"] and last["index"] == event["index"]
        ):
            field = next(name for name in delta if name != "type")
            last["delta"][field] += delta[field]
        elif event["type"] != "message_start":  # whose usage knows the prompt at one gateway alone
            spelled_events.append({**event, "delta": dict(delta)})
    return spelled_events
