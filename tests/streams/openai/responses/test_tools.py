"""Tools of calls of /v1/responses: what the model is offered, choices, and which are refused."""

import json
from typing import Any

import pytest

from tests.streams.gateway.answering import body
from tests.streams.gateway.in_process import call
from tests.streams.gateway.parsed_answers import (
    Pieces,
    called,
    prompt_of,
)
from tests.streams.openai.responses.tool_calls import (
    LIST,
    PATCH,
    PATH,
    READ,
    SEARCH,
    answering,
    created,
    streamed,
)

CHOICES: list[tuple[Any, str, list[str]]] = [
    (None, "auto", ["read", "list", "patch"]),
    ("auto", "auto", ["read", "list", "patch"]),
    ("required", "required", ["read", "list", "patch"]),
    (
        {"type": "function", "name": "list"},
        '{"type": "function", "function": {"name": "list"}}',
        ["read", "list", "patch"],
    ),
    (
        {"type": "custom", "name": "patch"},
        '{"type": "function", "function": {"name": "patch"}}',
        ["read", "list", "patch"],
    ),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "read"}, {"type": "custom", "name": "patch"}],
        },
        "required",
        ["read", "patch"],
    ),
]


@pytest.mark.parametrize(("choice", "expected", "names"), CHOICES)
async def test_tool_choice_reaches_the_parser(choice: Any, expected: str, names: list[str]) -> None:
    gateway = answering()
    response = await created(gateway, tool_choice=choice, parallel_tool_calls=False)
    assert response["tool_choice"] == (choice or "auto")
    assert response["parallel_tool_calls"] is False
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None and not parsing.parallel_tool_calls
    assert parsing.tool_choice == expected
    assert [tool["function"]["name"] for tool in json.loads(parsing.tools)] == names


async def test_tool_choice_none_offers_no_tool() -> None:
    gateway = answering()
    await created(gateway, tool_choice="none")
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None and (parsing.tools, parsing.tool_choice) == ("", "none")


@pytest.mark.parametrize("choice", [None, "required", {"type": "file_search"}])
async def test_search_and_functions_are_used_together(choice: Any) -> None:
    """The search is the call that a choice requires; the model may call functions after it."""
    gateway = answering()
    response = await created(gateway, tools=[READ, SEARCH], tool_choice=choice)
    (request,) = gateway.log.requests
    assert request.retrieval is not None and request.parsing is not None
    assert request.parsing.tool_choice == "auto"
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["file_search_call", "reasoning", "message", "function_call", "function_call"]
    events = await streamed(gateway, tools=[READ, SEARCH], tool_choice=choice)
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3, 4}
    events = await streamed(gateway, tools=[READ, SEARCH], tool_choice={**READ, "name": "read"})
    assert "file_search_call" not in {item["type"] for item in events[-1]["response"]["output"]}


UNSERVED = [
    {"type": "web_search"},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    {"type": "computer_use_preview"},
    {"name": "no type"},
    {"type": ["function"]},
]


@pytest.mark.parametrize("tool", UNSERVED, ids=str)
async def test_tool_that_cannot_run_is_refused_unless_excluded(tool: dict[str, Any]) -> None:
    gateway = answering(unserved_tools="refuse")
    tools = [READ, tool]
    for choice in (None, "auto", "required", tool):
        status, refused = await call(gateway, body(tools=tools, tool_choice=choice), PATH)
        assert status == 400, refused
        assert refused["error"]["param"] in ("tools.1.type", "tool_choice")
    assert not gateway.log.sent_records
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [READ]}
    for choice in ("none", {"type": "function", "name": "read"}, allowed):
        status, response = await call(gateway, body(tools=tools, tool_choice=choice), PATH)
        assert status == 200, response
    allowed["tools"] = [READ, tool]
    status, _ = await call(gateway, body(tools=tools, tool_choice=allowed), PATH)
    assert status == 400


async def test_tools_in_the_form_of_chats_are_taken() -> None:
    """Some clients of other servers send them."""
    gateway = answering()
    response = await created(gateway, tools=[{"type": "function", "function": READ}])
    assert response["tools"] == [{**READ, "strict": None}]
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None and json.loads(parsing.tools)[0]["function"]["name"] == "read"


async def test_call_as_codex_sends_it_is_answered() -> None:
    """Fields and items that coding agents send by default."""
    gateway = answering()
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "read", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "c2",
            "name": "patch",
            "input": "y",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "z"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    ]
    events = await streamed(
        gateway,
        input=items,
        instructions="Be an agent.",
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="019a",
        text={"verbosity": "medium"},
        service_tier="priority",
        client_metadata={"x-codex-installation-id": "1"},
    )
    response = events[-1]["response"]
    assert response["status"] == "completed" and response["service_tier"] == "default"
    assert "encrypted_content" not in response["output"][0]
    assert not gateway.log.responses.records


async def test_tools_that_cannot_run_are_ignored_beside_others() -> None:
    """A call that has nothing else is still refused, and so is a choice of such a tool."""
    gateway = answering()
    for choice in (None, "auto", "required"):
        await created(gateway, tools=[READ, *UNSERVED[:4]], tool_choice=choice)
        parsing = gateway.log.requests[-1].parsing
        assert parsing is not None
        assert [tool["function"]["name"] for tool in json.loads(parsing.tools)] == ["read"]
    refused: list[dict[str, Any]] = [
        {"tools": UNSERVED[:1]},
        {"tools": [READ, UNSERVED[5]]},
        {"tools": [READ, UNSERVED[6]]},
        {"tools": [READ, *UNSERVED[:1]], "tool_choice": UNSERVED[0]},
        {"tools": [READ, {**SEARCH, "vector_store_ids": []}]},
    ]
    for fields in refused:
        status, _ = await call(gateway, body(**fields), PATH)
        assert status == 400


SPACE = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [READ, PATCH]}
IN_SPACE: Pieces = (
    [called("{}", 0, "files__read")],
    [called('{"input": "x"}', 1, "files__patch")],
)


async def test_tools_of_a_namespace_have_both_names() -> None:
    gateway = answering(IN_SPACE)
    response = await created(gateway, tools=[SPACE, LIST])
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None
    names = [tool["function"]["name"] for tool in json.loads(parsing.tools)]
    assert names == ["files__read", "files__patch", "list"]
    assert response["tools"][0] == SPACE
    calls = [(c["type"], c["namespace"], c["name"]) for c in response["output"]]
    assert calls == [
        ("function_call", "files", "read"),
        ("custom_tool_call", "files", "patch"),
    ]
    assert response["output"][1]["input"] == "x"
    events = await streamed(gateway, tools=[SPACE, LIST])
    (call_done,) = (e for e in events if e["type"].endswith("function_call_arguments.done"))
    assert call_done["name"] == "read"
    await created(gateway, [{"role": "user", "content": "hello"}, *response["output"]])
    assert "files__read" in prompt_of(gateway) and "files__patch" in prompt_of(gateway)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "function", "name": "files__read"}, ["files__read"]),
        ({"type": "custom", "name": "patch", "namespace": "files"}, ["files__patch"]),
    ],
)
async def test_choice_names_tool_of_a_namespace(choice: Any, expected: list[str]) -> None:
    gateway = answering(IN_SPACE)
    await created(gateway, tools=[SPACE, LIST], tool_choice=choice)
    parsing = gateway.log.requests[0].parsing
    assert parsing is not None
    assert json.loads(parsing.tool_choice)["function"]["name"] == expected[0]
    allowed: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    await created(gateway, tools=[SPACE, LIST], tool_choice=allowed)
    allowed["tools"] = [{"type": "namespace", "name": "files"}]
    await created(gateway, tools=[SPACE, LIST], tool_choice=allowed)
    parsings = [request.parsing for request in gateway.log.requests[1:]]
    names = [
        [tool["function"]["name"] for tool in json.loads(parsing.tools)]
        for parsing in parsings
        if parsing is not None
    ]
    assert names == [expected, ["files__read", "files__patch"]]
    status, _ = await call(gateway, body(tools=[SPACE], tool_choice=allowed["tools"][0]), PATH)
    assert status == 400
