"""Calls of /v1/responses: whole and streamed, in OpenAI's shapes, and what is refused."""

from typing import Any

import pytest

from schemas.errors import BrokerUnavailable
from schemas.records import CancelReason, OutcomeKind, StructuredKind
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.answering import (
    RESPONSE,
    TEXTS,
    answer,
    answering,
    beside,
    body,
    checked,
    spelled,
)
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, frame
from tests.streams.gateway.small_tokenizer import tokenizer
from tests.streams.gateway.streamed_call import streamed_call
from tests.waits import until

PATH = "/v1/responses"


async def created(gateway: InProcessGateway, text: Any = "where?", **fields: Any) -> Any:
    status, response = await call(gateway, body(text, **fields), PATH)
    assert status == 200, response
    RESPONSE.validate_python(response)
    return response


async def test_whole_response_has_openai_shape() -> None:
    """The response has OpenAI's types, usage, and the fields of the call."""
    gateway = answering()
    response = await created(gateway, instructions="be kind", metadata={"a": "b"}, temperature=0.5)
    assert response["status"] == "completed" and response["error"] is None
    (message,) = response["output"]
    assert message["content"][0]["text"] == "".join(TEXTS)
    assert message["status"] == "completed"
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    call_fields = ("be kind", {"a": "b"}, 0.5, MODEL)
    assert call_fields == tuple(
        response[x] for x in ("instructions", "metadata", "temperature", "model")
    )
    (request,) = gateway.log.requests
    assert request.sampling.temperature == 0.5 and not request.keeps_running


async def test_truncated_response_is_incomplete() -> None:
    gateway = answering()
    response = await created(gateway, max_output_tokens=5)
    assert response["status"] == "completed"
    gateway = InProcessGateway()
    gateway.answer_with("a", "b", finish_reason="length")
    response = await created(gateway, max_output_tokens=2)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert gateway.log.requests[0].sampling.max_tokens == 2


async def test_streamed_response_has_openai_events() -> None:
    """Every event has OpenAI's type and a number that follows from the log."""
    gateway = answering()
    async with gateway.client() as client:
        response = await client.post(PATH, json=body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = checked(response.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert spelled(events) == events[-4]["text"] == "".join(TEXTS)
    whole = events[-1]["response"]
    assert whole["output"] == [events[-2]["item"]]
    assert whole["usage"]["output_tokens"] == 5
    assert {event["response"]["id"] for event in events if "response" in event} == {whole["id"]}


async def test_response_stream_starts_when_call_is_accepted() -> None:
    """The client can resume by the id, however long the first token takes."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, body(stream=True), PATH) as stream:
        await until(lambda: bool(stream.writes))
        assert [event["type"] for event in checked(stream.text)] == [
            "response.created",
            "response.in_progress",
        ]
    assert gateway.log.responses.records


async def test_failed_response_stream_ends_with_failed_event() -> None:
    gateway = answering("a", kind=OutcomeKind.EXPIRED)
    async with gateway.client() as client:
        response = await client.post(PATH, json=body(stream=True))
        whole = await client.post(PATH, json=body())
    last = checked(response.text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "rate_limit_exceeded"
    assert "deadline_exceeded" in last["response"]["error"]["message"]
    assert whole.status_code == 504


async def test_response_that_fails_before_first_token_has_no_output() -> None:
    gateway = InProcessGateway()
    gateway.answer_with(kind=OutcomeKind.FAILED)
    async with gateway.client() as client:
        response = await client.post(PATH, json=body(stream=True))
    events = checked(response.text)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert events[-1]["response"]["output"] == []
    assert events[-1]["response"]["error"]["code"] == "server_error"


async def test_input_items_become_chat_messages() -> None:
    gateway = answering()
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "1", "annotations": []}],
        },
        {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["one"]},
        {"role": "user", "content": "two"},
    ]
    await created(gateway, text=items)
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two"},
        ],
    }
    await call(gateway, chat)
    first, second = gateway.log.requests
    assert first.prompt_tokens == second.prompt_tokens
    assert first.session_id == second.session_id, "the same words, the same conversation"
    assert first.turn == 1


CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}


async def test_input_tool_calls_and_results_become_chat_messages() -> None:
    """Agents send histories of other models."""
    gateway = answering()
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hm"}], "phase": "x"},
        CALLED,
        {**CALLED, "type": "custom_tool_call", "call_id": "c2", "input": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ]
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    fields: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    fields |= {"reasoning": {"effort": "low", "summary": "auto"}}
    response = await created(gateway, text=items, tools=[function], tool_choice="none", **fields)
    assert response["reasoning"]["effort"] == "low"
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"input": "{}"}'}},
    ]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
    await call(gateway, {"model": MODEL, "messages": messages})
    first, second = gateway.log.requests
    assert first.prompt_tokens == second.prompt_tokens


async def test_item_references_resolve_to_stored_items() -> None:
    """Any gateway resolves them; reasoning items are in no prompt."""
    first = answering()
    second_gateway = beside(first)
    second_gateway.log.on_request = lambda request: answer(second_gateway, request)
    response = await created(first, text="one")
    message = response["output"][-1]
    questions = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    references = [
        {"type": "item_reference", "id": name} for name in ("rs_1", message["id"], "fs_1")
    ]
    await created(second_gateway, text=[questions[0], *references, questions[1]])
    await created(second_gateway, text=[questions[0], message, questions[1]])
    by_id, whole = second_gateway.log.requests
    assert by_id.prompt_tokens == whole.prompt_tokens
    for name in ("msg_1", "fc_1", message["id"][:-1] + "B"):
        status, error_body = await call(
            second_gateway, body([{"type": "item_reference", "id": name}]), PATH
        )
        assert (status, error_body["error"]["code"]) == (404, "not_found")


async def test_auto_truncation_drops_earliest_turns() -> None:
    """It drops as few turns as possible, and never the instructions."""
    gateway = answering(max_model_len=60)
    turns = [{"role": "user", "content": f"{i} " + "hello " * 8} for i in range(6)]
    status, response = await call(gateway, body(turns, instructions="brief"), PATH)
    assert (status, response["error"]["param"]) == (400, "input")
    response = await created(gateway, text=turns, instructions="brief", truncation="auto")
    assert response["truncation"] == "auto"
    (request,) = gateway.log.requests
    text = tokenizer().encoder.raw.decode(unpack_tokens(request.prompt_tokens))
    turns_in_prompt = [f"{i} hello" for i in range(6) if f"{i} hello" in text]
    assert text.startswith("brief") and turns_in_prompt and turns_in_prompt[-1] == "5 hello"
    less = turns[6 - len(turns_in_prompt) - 1 :]
    assert (await call(gateway, body(less, instructions="brief"), PATH))[0] == 400
    alone = [{"role": "user", "content": "hello " * 80}]
    assert (await call(gateway, body(alone, truncation="auto"), PATH))[0] == 400


async def test_responses_endpoint_forwards_chat_options() -> None:
    gateway = answering()
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response = await created(
        gateway, seed=7, priority="batch", include=["message.output_text.logprobs"]
    )
    assert response["output"][0]["content"][0]["logprobs"] == []
    await call(gateway, {**body(), "text": {"format": form}}, PATH)
    first, second = gateway.log.requests
    assert (first.sampling.seed, first.priority, first.sampling.logprobs) == (7, "batch", 0)
    structured = second.sampling.structured
    assert structured is not None and structured.kind is StructuredKind.JSON_SCHEMA


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"type": "item_reference"}]}, "input.0.id: expected a string"),
    ({"input": [{"type": "item_reference", "id": "rs_1"}] * 65}, "at most 64 references"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type: expected one of message, function_"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id: expected"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input: expected a message, found none"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content: expected"[:15]),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role: expected user"),
    ({"input": [{"role": "user", "content": 3}]}, "input.0.content: expected a text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text is served"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "expected a string"),
    ({"input": []}, "input: expected a message"),
    ({"input": 3}, "input: expected"),
    ({"model": "no"}, "model: expected"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: expected function, custom, "),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools.0: expected a namespace with"),
    (
        {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "web_search"}]}]},
        "tools.0: expected a namespace with",
    ),
    (
        {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]},
        "tools.0.tools.0.name: expected",
    ),
    ({"tool_choice": "some"}, "tool_choice: expected"),
    ({"tools": [{"type": "function"}]}, "tools.0.name: expected 1 to 128 letters"),
    ({"tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name: expected 1 to 128 letters"),
    ({"tools": [{"type": "custom", "name": "c", "format": {"type": "x"}}]}, "tools.0.format:"),
    ({"tools": [{"type": "custom", "name": "c", "description": 3}]}, "tools.0.description:"),
    ({"tools": [{"type": "function", "name": "f"}] * 129}, "tools: expected at most 128"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice:"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools: this deployment knows no parser"),
    (
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
        "tools: this deployment knows no parser",
    ),
    ({"tools": [{"type": "file_search"}]}, "tools.0.vector_store_ids: required"),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["a", "b"]}]}, "one collection"),
    ({"tool_choice": "required"}, "tool_choice: expected"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice: expected"),
    ({"truncation": "some"}, "truncation: expected 'auto' or 'disabled'"),
    ({"conversation": 1}, "conversation: expected the id of a conversation"),
    ({"prompt": {"id": "p"}}, "prompt: not supported"),
    ({"include": ["reasoning.what"]}, "include.0: expected"),
    ({"top_logprobs": 3}, "top_logprobs: needs"),
    ({"background": True, "store": False}, "background: needs store"),
    ({"metadata": {"a": "x" * 600}}, "metadata: expected"),
    ({"metadata": {"a": 1}}, "metadata.a: expected"),
    ({"text": {"verbosity": "few"}}, "text.verbosity: expected"),
    ({"service_tier": "best"}, "service_tier: expected"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls: expected"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema: required"),
    ({"max_output_tokens": 0}, "max_output_tokens: expected"),
    ({"temperature": 3}, "temperature: expected"),
    ({"tmperature": 1}, "tmperature: unknown field"),
    ({"n": 2}, "n: unknown field"),
    ({"previous_response_id": "resp_1"}, "response 'resp_1': not known"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda argument: str(argument)[:40])
async def test_responses_endpoint_rejects_unsupported_fields(
    fields: dict[str, Any], message: str
) -> None:
    gateway = answering()
    status, response = await call(gateway, {**body(), **fields}, PATH)
    assert status in (400, 404), response
    assert message in response["error"]["message"]
    assert not gateway.log.sent_records and not gateway.state.calls.in_flight


async def test_response_that_cannot_be_stored_is_cancelled() -> None:
    gateway = InProcessGateway()

    async def refused(record: Any) -> Any:
        raise BrokerUnavailable("away")

    gateway.log.responses.put = refused  # type: ignore[method-assign]  # the log is away
    status, response = await call(gateway, body(), PATH)
    assert status == 503, response
    await until(lambda: bool(gateway.log.cancellations))
    assert gateway.log.cancellations[0].reason is CancelReason.CLIENT_GONE
    assert not gateway.state.calls.in_flight


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        (
            "input.0",
            {"input": [{"type": "reasoning", "x": 2**64}, {"role": "user", "content": "a"}]},
        ),
        (
            "tools",
            {
                "tools": [{"type": "function", "name": "f", "parameters": {"maximum": 2**64}}],
                "tool_choice": "none",
            },
        ),
    ],
)
async def test_responses_endpoint_rejects_huge_number_before_accepting(
    field: str, fields: dict[str, Any]
) -> None:
    gateway = answering()
    status, response = await call(gateway, {**body(), **fields}, PATH)
    assert (status, response["error"]["param"]) == (400, field), response
    assert not gateway.state.calls.in_flight and not gateway.log.requests


async def test_internal_error_after_acceptance_frees_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = InProcessGateway()

    def wrong(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(gateway.state.response_ids, "name", wrong)
    status, _ = await call(gateway, body(), PATH)
    assert status == 500
    await until(lambda: bool(gateway.log.cancellations))
    assert not gateway.state.calls.in_flight


async def test_unstored_response_is_not_found() -> None:
    gateway = answering()
    response = await created(gateway, store=False)
    assert not gateway.log.responses.records and response["store"] is False
    async with gateway.client() as client:
        assert (await client.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_disconnect_cancels_response_stream() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, body(stream=True), PATH) as stream:
        await until(lambda: bool(stream.writes))
        await gateway.log.push(frame(gateway.log.requests[0].request_id, ["a"]))
    await until(lambda: bool(gateway.log.cancellations))
