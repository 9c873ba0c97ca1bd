"""Items of reasoning and tool calls in /v1/responses: answers, events, and next turns."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from streams.calls.request.chat import Chat
from tests.streams.gateway.answering import RESPONSE, body, checked
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.parsed_answers import (
    PARSERS,
    THINKS_AND_CALLS,
    Pieces,
    content,
    frames_of,
    parsed_answer,
    prompt_of,
)
from tests.streams.gateway.samples import MODEL
from tests.streams.gateway.streamed_call import streamed_call
from tests.streams.openai.responses.tool_calls import (
    PATCHES,
    PATH,
    SCHEMA,
    TOOLS,
    answering,
    beside,
    created,
    streamed,
)
from tests.waits import until


def kinds_of(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def merged(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without numbers, and neighbouring deltas of one item as one."""
    merged_events: list[dict[str, Any]] = []
    for event in events:
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        last = merged_events[-1] if merged_events else {}
        if event["type"].endswith(".delta") and (
            (last.get("type"), last.get("item_id")) == (event["type"], event["item_id"])
        ):
            last["delta"] += event["delta"]
        else:
            merged_events.append(event)
    return merged_events


async def test_answer_has_items_of_reasoning_and_calls() -> None:
    gateway = answering()
    response = await created(gateway, parallel_tool_calls=True)
    thought, message, *calls = response["output"]
    assert response["status"] == "completed" and response["parallel_tool_calls"]
    assert (thought["type"], thought["summary"], thought["status"]) == (
        "reasoning",
        [],
        "completed",
    )
    assert thought["content"] == [{"type": "reasoning_text", "text": "I look."}]
    assert message["content"][0]["text"] == "\n\nLet me see.\n"
    assert [(c["type"], c["name"], c["arguments"], c["call_id"], c["status"]) for c in calls] == [
        ("function_call", "read", '{"path": "a"}', "call_0", "completed"),
        ("function_call", "list", "{}", "call_1", "completed"),
    ]
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == 4 and [name[:3] for name in ids] == ["rs_", "msg", "fc_", "fc_"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    (request,) = gateway.log.requests
    assert request.parsing is not None and request.parsing.tool_choice == "auto"
    functions = [tool["function"] for tool in json.loads(request.parsing.tools)]
    assert [function["name"] for function in functions] == ["read", "list", "patch"]
    assert functions[0]["parameters"] == SCHEMA
    assert functions[2]["parameters"]["required"] == ["input"]
    assert "match this lark grammar:\nstart: WORD" in functions[2]["description"]


async def test_stream_has_events_of_reasoning_and_calls() -> None:
    """In OpenAI's order: an item ends before the next begins."""
    events = await streamed(answering())
    assert kinds_of(merged(events)) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    items = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert events[-1]["response"]["output"] == items
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    added = [event["item"] for event in events if event["type"].endswith("output_item.added")]
    assert [item["id"] for item in added] == [item["id"] for item in items]
    assert {item["status"] for item in added} == {"in_progress"}
    (call_done, _) = (event for event in events if event["type"].endswith("arguments.done"))
    assert (call_done["name"], call_done["arguments"]) == ("read", '{"path": "a"}')


async def test_custom_tool_call_streams_its_text() -> None:
    """Clients get the text of the argument without the escapes of JSON."""
    gateway = answering(PATCHES)
    events = await streamed(gateway)
    texts = [event["delta"] for event in events if "custom_tool_call_input.delta" in event["type"]]
    assert "".join(texts) == 'a\n"b'
    *_, input_done, item_done, completed = events
    assert (input_done["type"], input_done["input"]) == (
        "response.custom_tool_call_input.done",
        'a\n"b',
    )
    item = item_done["item"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", 'a\n"b')
    assert item["id"].startswith("ctc_") and item["call_id"] == "call_0"
    assert completed["response"]["output"][-1] == item
    assert (await created(gateway))["output"][1]["input"] == 'a\n"b'


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("pieces", [THINKS_AND_CALLS, PATCHES], ids=["functions", "custom"])
async def test_second_gateway_resumes_call_after_any_event(pieces: Pieces, together: bool) -> None:
    """However the answer's tokens are grouped, no event is repeated, lost or numbered anew."""
    first = InProcessGateway(max_model_len=2_048, parsers=PARSERS)
    request_body = body(stream=True, background=True, tools=TOOLS)
    async with streamed_call(first, request_body, PATH) as stream:
        await until(lambda: bool(stream.writes))
        frames = frames_of(first.log.requests[0], pieces)
        if together:
            await first.log.push(*frames)
        for token_frame in [] if together else frames:
            writes = len(stream.writes)
            await first.log.push(token_frame)
            if any(
                delta.text.strip('\\ \n"}')
                for entry in token_frame.deltas
                for delta in entry.deltas
            ):
                await until(lambda writes=writes: len(stream.writes) > writes)
        await until(lambda: stream.over)
    whole = checked(stream.text)
    name, second = whole[0]["response"]["id"], beside(first)
    for i, event in enumerate(whole):
        after = event["sequence_number"]
        async with second.client() as client:
            rest = await client.get(f"{PATH}/{name}?stream=true&starting_after={after}")
        events = checked(rest.text)
        assert all(rest_event["sequence_number"] > after for rest_event in events)
        assert merged([*whole[: i + 1], *events]) == merged(whole)
        if events:
            assert events[-1]["sequence_number"] == whole[-1]["sequence_number"]
    async with second.client() as client:
        stored_response = (await client.get(f"{PATH}/{name}")).json()
    assert stored_response == whole[-1]["response"]


async def test_poll_shows_call_in_progress() -> None:
    first = InProcessGateway(max_model_len=2_048, parsers=PARSERS)
    response = await created(first, background=True)
    *frames, _ = frames_of(first.log.requests[0], THINKS_AND_CALLS)
    second, polls = beside(first), list[list[str]]()
    for token_frame in frames:
        await first.log.push(token_frame)
        async with second.client() as client:
            polled = (await client.get(f"{PATH}/{response['id']}")).json()
        RESPONSE.validate_python(polled)
        assert polled["status"] == "in_progress"
        polls.append([f"{item['type']} {item['status']}" for item in polled["output"]])
    assert polls[0] == ["reasoning in_progress"] == polls[3]
    assert polls[-1] == [
        *("reasoning completed", "message completed"),
        *("function_call completed", "function_call in_progress"),
    ]


async def test_cut_answer_is_incomplete_at_its_last_item() -> None:
    response = await created(answering(THINKS_AND_CALLS[:-1], finish_reason="length"))
    assert response["status"] == "incomplete"
    statuses = [item["status"] for item in response["output"]]
    assert statuses == ["completed", "completed", "incomplete"]


def parsed_call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "\n\nLet me see.\n",
        "reasoning": "I look.",
        "tool_calls": [
            parsed_call("read", '{"path": "a"}', "call_0"),
            parsed_call("list", "{}", "call_1"),
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "x"},
    {"role": "tool", "tool_call_id": "call_1", "content": "y"},
]
RESULTS = [
    {"type": "function_call_output", "call_id": "call_0", "output": "x"},
    {"type": "function_call_output", "call_id": "call_1", "output": "y"},
]


async def prompt_of_chat(messages: list[dict[str, Any]]) -> str:
    gateway = answering()
    functions = [{"type": "function", "function": {"name": "read"}}]
    status, _ = await call(gateway, {"model": MODEL, "messages": messages, "tools": functions})
    assert status == 200
    return prompt_of(gateway)


@pytest.mark.parametrize("way", ["items", "previous", "references", "streamed"])
async def test_results_of_calls_continue_the_conversation(way: str) -> None:
    """The model reads the same, and the session stays, whichever way the client goes on."""
    first = answering()
    if way == "streamed":
        response = (await streamed(first, input="hello"))[-1]["response"]
    else:
        response = await created(first)
    second = beside(first, ([content("Done.")],))
    for turn in first.log.published_turns:
        second.state.conversations.add(turn)
    items = response["output"]
    if way == "references":
        items = [{"type": "item_reference", "id": item["id"]} for item in items]
    if way == "previous":
        await created(second, RESULTS, previous_response_id=response["id"])
    else:
        await created(second, [{"role": "user", "content": "hello"}, *items, *RESULTS])
    assert prompt_of(second) == await prompt_of_chat(CHAT)
    (request,), (earlier,) = second.log.requests, first.log.requests
    assert (request.session_id, request.turn) == (earlier.session_id, 1)


async def test_custom_call_and_its_result_continue_the_conversation() -> None:
    gateway = answering(PATCHES)
    items = [{"role": "user", "content": "hello"}, *(await created(gateway))["output"]]
    result = {"type": "custom_tool_call_output", "call_id": "call_0", "output": "patched"}
    await created(gateway, [*items, result])
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "Now.",
            "tool_calls": [parsed_call("patch", '{"input": "a\\n\\"b"}', "call_0")],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "patched"},
    ]
    assert prompt_of(gateway) == await prompt_of_chat(chat)


async def test_reasoning_reaches_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, chats = answering(), list[Chat]()
    tokenizer = gateway.state.models.default.tokenizer
    encode = tokenizer.encode_chat

    async def noted(chat: Chat, **fields: Any) -> Any:
        chats.append(chat)
        return await encode(chat, **fields)

    monkeypatch.setattr(tokenizer, "encode_chat", noted)
    parts = [{"type": "reasoning_text", "text": "Hm."}]
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"type": "reasoning", "id": "rs_3", "summary": [], "content": parts},
    ]
    await created(gateway, items, tools=[], text={"verbosity": "low"})
    texts = [(message["content"], message.get("reasoning")) for message in chats[0].messages]
    assert texts == [("a", None), ("b", "Hm."), ("c", None), ("d", None)]
    assert chats[0].variables == {"verbosity": "low"}


async def test_truncation_drops_results_with_their_calls() -> None:
    gateway = InProcessGateway(max_model_len=120, parsers=PARSERS)
    gateway.log.on_request = parsed_answer(gateway, THINKS_AND_CALLS)
    items: list[dict[str, Any]] = [{"role": "user", "content": "hello " * 8}]
    for i in range(4):
        items.append(
            {"type": "function_call", "call_id": f"c{i}", "name": "read", "arguments": "{}"}
        )
        output = f"{i} " + "hello " * 4
        items.append({"type": "function_call_output", "call_id": f"c{i}", "output": output})
    await created(gateway, items, truncation="auto")
    prompt = prompt_of(gateway)
    assert "3 hello" in prompt and "0 hello" not in prompt
    assert prompt.count("<tool_call>") == prompt.count("<tool_response>") > 0
