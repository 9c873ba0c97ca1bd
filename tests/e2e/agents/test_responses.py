"""The stock client of /v1/responses on a stack: simulated engines say what the prompt tells them,
and workers parse it with vLLM's own parsers."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from infra.bench.faults.log_audit import audit
from infra.stack.launcher import Stack
from streams.calls.ids import from_public
from tests.conftest import _fresh_topics
from tests.e2e.audits import decoder
from tests.e2e.harness import met, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import PATIENCE_S
from workers.llm.sim.settings import SCRIPT_MARKS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
PATH_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "name": "read", "parameters": PATH_SCHEMA, "strict": False},
    {"type": "custom", "name": "patch", "description": "Applies a patch."},
]
CALLS = 5
LINES = "\n".join(f'+ line {i}: a "quoted" word, a tab\t and a é' for i in range(30))
AT_LEAST_EVENTS = 60  # that a client has when the worker dies


def script(text: str) -> str:
    """A text that makes the engine answer so."""
    return f"Say {SCRIPT_MARKS[0]}{text}{SCRIPT_MARKS[1]}"


def call_script(name: str, **arguments: str) -> str:
    """The text of a call, as models of Hermes' kind write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Pools in which a decode worker may die, and two gateways."""
    settings = sim_settings(await _fresh_topics(bootstrap), scripted=True, decode_step_ms=4.0)
    model = replace(
        settings.model, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=16_384
    )
    settings = replace(settings, model=model)
    folder = tmp_path_factory.mktemp("responses")
    async with stack(
        settings, folder, lease_ms=BRIEF_LEASE_MS, prefill=1, decode=2, gateways=2
    ) as running_stack:
        yield running_stack


@pytest.fixture
async def client(running: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    await running.wait_ready()
    await met(running)
    async with responses_client(running, 0) as stock:
        yield stock


def responses_client(running: Stack, gateway: int) -> openai.AsyncOpenAI:
    url = running.gateway_urls[gateway] + "/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="x", timeout=PATIENCE_S, max_retries=0)


def fields_of(running: Stack) -> dict[str, Any]:
    return {"model": running.settings.model.served_name, "tools": TOOLS, "temperature": 0}


@pytest.mark.parametrize("by_id", [False, True])
async def test_agent_loops_over_calls(
    running: Stack, client: openai.AsyncOpenAI, by_id: bool
) -> None:
    """Each turn reasons and calls; the next one brings the result, with all items or by id."""
    fields = fields_of(running)
    items: list[Any] = [{"role": "user", "content": script(turn_script(0))}]
    previous_id: str | None = None
    for turn in range(CALLS):
        async with client.responses.stream(
            input=items, previous_response_id=previous_id, **fields
        ) as stream:
            response = await stream.get_final_response()
        thought, call = response.output
        assert thought.type == "reasoning" and thought.content
        assert thought.content[0].text.strip() == f"Step {turn}."
        assert call.type == "function_call" and json.loads(call.arguments) == {"path": f"{turn}"}
        assert response.usage is not None
        assert 0 < response.usage.output_tokens_details.reasoning_tokens
        result = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": script(turn_script(turn + 1)),
        }
        own_items = [item.model_dump(exclude_none=True) for item in response.output]
        items = [result] if by_id else [*items, *own_items, result]
        previous_id = response.id if by_id else None
    last = await client.responses.create(input=items, previous_response_id=previous_id, **fields)
    assert last.output_text.strip() == "Done."
    assert [item.type for item in last.output] == ["reasoning", "message"]


def turn_script(turn: int) -> str:
    if turn == CALLS:
        return "I am done.\n</think>\n\nDone."
    return f"Step {turn}.\n</think>\n\n{call_script('read', path=str(turn))}"


async def test_call_streams_unchanged_when_its_worker_dies(
    running: Stack, client: openai.AsyncOpenAI
) -> None:
    """The events of a function's call and of a custom tool's equal those without a fault."""
    calls = call_script("read", path=LINES) + "\n" + call_script("patch", input=LINES)
    question = script(f"Long.\n</think>\n\nNow.\n{calls}")
    undisturbed_events, _ = await events_of(running, client, question)
    assert texts_of(undisturbed_events)[-1] == LINES
    for kill_after in (AT_LEAST_EVENTS, len(undisturbed_events) * 2 // 3):
        await running.wait_ready()
        await met(running)
        events, worker = await events_of(running, client, question, kill_after=kill_after)
        assert worker
        assert spelled(events) == spelled(undisturbed_events)
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == undisturbed_events[-1]["sequence_number"]
        request_id = from_public(events[0]["response"]["id"])
        decisions = (await audit(running.settings.log)).decisions[request_id]
        assert max(decision.attempt for decision in decisions) > 1
        async with responses_client(running, 1) as other_client:
            stored_response = await other_client.responses.retrieve(events[0]["response"]["id"])
        assert (
            stored_response.model_dump(exclude_unset=True)["output"]
            == events[-1]["response"]["output"]
        )


async def events_of(
    running: Stack, client: openai.AsyncOpenAI, question: str, kill_after: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """The events of a stream, and the worker that was killed after so many of them."""
    events: list[dict[str, Any]] = []
    worker_id = ""
    stream = await client.responses.create(input=question, stream=True, **fields_of(running))
    async for event in stream:
        events.append(event.model_dump(exclude_unset=True))
        if len(events) == kill_after:
            request_id = from_public(events[0]["response"]["id"])
            worker_id, _ = await decoder(running.settings.log, request_id)
            await running.kill(worker_id)
    return events, worker_id


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    """What the calls of the answer say."""
    output = events[-1]["response"]["output"]
    return [
        item.get("input") or json.loads(item["arguments"])["path"]
        for item in output
        if "call_id" in item
    ]


def spelled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without numbers, with ids by their order, and with neighbouring deltas of one
    item as one, however gateways group them."""
    ids: dict[str, str] = {}
    spelled_events: list[dict[str, Any]] = []
    for event in events:
        if "response" in event:
            event = {"type": event["type"], "output": event["response"]["output"]}
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        event = renamed(event, ids)
        last = spelled_events[-1] if spelled_events else {}
        if event["type"].endswith(".delta") and (
            (last.get("type"), last.get("item_id")) == (event["type"], event["item_id"])
        ):
            last["delta"] += event["delta"]
        else:
            spelled_events.append(event)
    return spelled_events


def renamed(value: Any, ids: dict[str, str]) -> Any:
    """A value with ids of items and calls by their order."""
    if isinstance(value, list):
        return [renamed(item, ids) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: ids.setdefault(item, f"id {len(ids)}")
        if name in ("id", "item_id", "call_id")
        else renamed(item, ids)
        for name, item in value.items()
    }


async def test_conversation_goes_on_at_two_gateways(
    running: Stack, client: openai.AsyncOpenAI
) -> None:
    """Each turn is at another gateway, and brings its question alone; the answer to the second one
    calls a tool. The turns are one session, so the second one finds the KV of the first."""
    fields = fields_of(running)
    conversation = await client.conversations.create(metadata={"topic": "ferries"})
    thought = "Seen.\n</think>\n\n"
    async with responses_client(running, 1) as other_client:
        first = await client.responses.create(
            input=script(f"{thought}Pier 7."), conversation=conversation.id, **fields
        )
        async with other_client.responses.stream(
            input=script(thought + call_script("read", path="a")),
            conversation=conversation.id,
            **fields,
        ) as stream:
            second = await stream.get_final_response()
        items = [
            item async for item in client.conversations.items.list(conversation.id, order="asc")
        ]
        kinds = ("message", "reasoning")
        assert [item.type for item in items] == [*kinds, "message", *kinds, "function_call"]
        assert [item.id for item in items if item.type != "message" or item.role != "user"] == [
            item.id for item in (*first.output, *second.output)
        ]
        assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 0
        requests = (await audit(running.settings.log)).requests
        sessions = {requests[from_public(turn.id)].session_id for turn in (first, second)}
        assert sessions == {conversation.id}
        await other_client.conversations.delete(conversation.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(input="And?", conversation=conversation.id, **fields)
        assert (await client.responses.retrieve(first.id)).output_text.strip() == "Pier 7."
