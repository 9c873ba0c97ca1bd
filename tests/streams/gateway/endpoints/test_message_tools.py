"""Messages with thinking and calls of tools, in both directions."""

import json
from typing import Any

import pytest

from schemas.model.parsers import ParserNames
from tests.streams.gateway.answering import beside
from tests.streams.gateway.endpoints.test_messages import (
    MESSAGE,
    PATH,
    checked,
    created,
)
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.parsed_answers import (
    PARSERS,
    called,
    content,
    parsed_answer,
    parsing_gateway,
    prompt_of,
    reasoning,
)
from tests.streams.gateway.samples import message
from tests.streams.gateway.streamed_call import WITH_IDS, streamed_call
from tests.waits import until

TOOLS = [
    {
        "name": "read",
        "description": "Read a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "list", "input_schema": {"type": "object"}, "type": "custom"},
]
THINKING = {"type": "enabled", "budget_tokens": 1_024}


async def streamed(gateway: InProcessGateway, **fields: Any) -> list[dict[str, Any]]:
    async with gateway.client() as client:
        response = await client.post(PATH, json=message(stream=True, **fields))
    assert response.status_code == 200, response.text
    return checked(response.text)


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events of a stream add up to."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            elif delta["type"] == "input_json_delta":
                texts[event["index"]] += delta["partial_json"]
            else:
                field = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                block[field] += delta[field]
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use" and text:
            block["input"] = json.loads(text)
    return blocks


async def test_answer_thinks_and_calls_tools() -> None:
    """Whole and streamed, it has the same blocks; white space alone is none."""
    gateway = parsing_gateway()
    whole = await created(gateway, tools=TOOLS, thinking=THINKING)
    thinking, text, read, listed = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I look.")
    assert thinking["signature"]
    assert text["text"].strip() == "Let me see."
    assert read == {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a"}}
    assert listed == {"type": "tool_use", "id": "call_1", "name": "list", "input": {}}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    events = await streamed(gateway, tools=TOOLS, thinking=THINKING)
    blocks = folded(events)
    signature = blocks[0].pop("signature")
    assert signature and thinking.pop("signature") != signature, "of other requests"
    assert blocks == whole["content"]
    bounds = ("content_block_start", "content_block_stop")
    assert [e["type"] for e in events if e["type"] in bounds] == [*bounds] * 4
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)),
        ({"type": "none"}, ("none", True)),
        (
            {"type": "tool", "name": "list", "disable_parallel_tool_use": True},
            ('{"type": "function", "function": {"name": "list"}}', False),
        ),
    ],
)
async def test_choice_of_tools_reaches_worker(choice: Any, expected: Any) -> None:
    gateway = parsing_gateway()
    await created(gateway, tools=TOOLS, tool_choice=choice)
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None
    assert (parsing.tool_choice, parsing.parallel_tool_calls) == expected
    if expected[0] != "none":
        tools = json.loads(parsing.tools)
        assert [tool["function"]["name"] for tool in tools] == ["read", "list"]
        assert tools[0]["function"]["parameters"] == TOOLS[0]["input_schema"]
        assert "cache_control" not in parsing.tools


@pytest.mark.parametrize(
    ("thinking", "thinks", "is_shown"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        (THINKING, True, True),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "omitted"}, True, False),
    ],
)
async def test_thinking_is_switched_by_call(thinking: Any, thinks: bool, is_shown: bool) -> None:
    gateway = parsing_gateway([[content("a")]])
    await created(gateway, thinking=thinking)
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None and parsing.include_reasoning is is_shown
    assert json.loads(parsing.template_kwargs)["enable_thinking"] is thinks


@pytest.mark.parametrize(("parser", "expected"), [("qwen3", 32), ("granite", None)])
async def test_budget_bounds_thinking_if_its_end_is_known(
    parser: str, expected: int | None
) -> None:
    """Clients send budgets for any model, so none is refused."""
    gateway = InProcessGateway(parsers=ParserNames(tool="hermes", reasoning=parser))
    gateway.log.on_request = parsed_answer(gateway, [[content("a")]])
    await created(gateway, thinking={"type": "enabled", "budget_tokens": 32})
    assert gateway.log.requests[0].sampling.thinking_token_budget == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"n": 1, "path": "a/lo', {"n": 1}),
        ("", {}),
        ("{'path'", {"INVALID_JSON": "{'path'"}),
        ("7", {"INVALID_JSON": "7"}),
    ],
)
async def test_input_of_cut_or_wrong_call_stays_readable(arguments: str, expected: Any) -> None:
    pieces = [[called("", 0, "read"), called(arguments)]]
    whole = await created(parsing_gateway(pieces, finish_reason="length"), tools=TOOLS)
    assert whole["content"][0]["input"] == expected
    assert whole["stop_reason"] == "max_tokens"


async def test_calls_written_in_turns_keep_their_blocks() -> None:
    pieces = [
        [called('{"path": ', 0, "read"), called("{", 1, "list")],
        [called('"a"}', 0), called("}", 1)],
    ]
    gateway = parsing_gateway(pieces)
    whole = await created(gateway, tools=TOOLS)
    assert [block["input"] for block in whole["content"]] == [{"path": "a"}, {}]
    assert folded(await streamed(gateway, tools=TOOLS)) == whole["content"]


async def test_thinking_between_calls_has_blocks_of_its_own() -> None:
    pieces = [[reasoning("a")], [content("b")], [reasoning("c")], [called("{}", 0, "list")]]
    whole = await created(parsing_gateway(pieces), tools=TOOLS, thinking=THINKING)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "thinking", "tool_use"]
    signatures = [block["signature"] for block in whole["content"] if "signature" in block]
    assert len(set(signatures)) == 2


async def test_next_turn_with_results_continues_session() -> None:
    """What an answer has is sent back as it is, with results of its calls."""
    gateway = parsing_gateway()
    first = await created(gateway, tools=TOOLS, thinking=THINKING)
    MESSAGE.validate_python(first)
    results = [
        {"type": "tool_result", "tool_use_id": f"call_{i}", "content": f"result {i}"}
        for i in range(2)
    ]
    turns = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    await created(gateway, messages=turns, tools=TOOLS, thinking=THINKING)
    request = gateway.log.requests[1]
    assert request.turn == 1
    prompt = prompt_of(gateway)
    assert prompt.index("result 0") < prompt.index("result 1")


async def test_tools_need_parser_of_model() -> None:
    gateway = InProcessGateway()
    status, body = await call(gateway, message(tools=TOOLS), PATH)
    assert status == 400 and "no parser" in body["error"]["message"]
    gateway.answer_with("a")
    await created(gateway, tools=TOOLS, tool_choice={"type": "none"})


async def test_parsed_stream_resumes_after_each_event_at_second_gateway() -> None:
    first = parsing_gateway()
    second = beside(first, parsers=PARSERS)
    body = message(stream=True, tools=TOOLS, thinking=THINKING)
    async with streamed_call(first, body, PATH, **WITH_IDS) as stream:
        await until(lambda: stream.over)
    blocks = [block for block in stream.text.split("\n\n") if block]
    whole = folded(checked(stream.text))
    assert len(stream.ids) == len(blocks)
    for i, event_id in enumerate(stream.ids[:-1]):
        async with streamed_call(second, body, PATH, **{"Last-Event-ID": event_id}) as rest:
            await until(lambda rest=rest: rest.over)
        events = checked("\n\n".join(blocks[: i + 1]) + "\n\n" + rest.text)
        assert folded(events) == whole
        assert [event["type"] for event in events].count("content_block_start") == 4
        assert rest.ids[-1] == stream.ids[-1]
