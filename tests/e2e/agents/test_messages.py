"""The stock client of Anthropic's API on a stack: simulated engines say what the prompt tells them,
and workers parse it with vLLM's own parsers."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from infra.stack.launcher import Stack
from tests.conftest import _fresh_topics
from tests.e2e.harness import sim_settings, stack
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


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two replicas and two gateways."""
    settings = sim_settings(await _fresh_topics(bootstrap), scripted=True)
    model = replace(
        settings.model, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=4_096
    )
    folder = tmp_path_factory.mktemp("messages")
    settings = replace(settings, model=model)
    async with stack(settings, folder, replica=1, gateways=2) as running_stack:
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
        for i, event_id in enumerate(event_ids[:-1]):
            rest = await second.post(path, json={}, headers={"Last-Event-ID": event_id})
            joined = events_of("\n\n".join(blocks[: i + 1]) + "\n\n" + rest.text)
            assert spelled(joined) == spelled(events_of(whole.text))


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
            spelled_events.append(event)
    return spelled_events
