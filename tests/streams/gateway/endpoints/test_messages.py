"""Calls of /v1/messages: whole and streamed, in Anthropic's shapes, and what is refused."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from schemas.errors import BrokerUnavailable
from schemas.records import OutcomeKind, StructuredKind, WireError
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.answering import TEXTS, answer, answering, beside
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.parsed_answers import prompt_of
from tests.streams.gateway.samples import MODEL, events_of, frame, message, stream_end
from tests.streams.gateway.streamed_call import WITH_IDS, accepted_requests, streamed_call
from tests.waits import until

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEXT = "".join(TEXTS)
MESSAGE = TypeAdapter(Message)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


async def created(gateway: InProcessGateway, content: Any = "where?", **fields: Any) -> Any:
    status, whole = await call(gateway, message(content, **fields), PATH)
    assert status == 200, whole
    MESSAGE.validate_python(whole)
    return whole


async def refusal(content: Any = "where?", path: str = PATH, **fields: Any) -> str:
    """The message of the 400 that a call gets; nothing is accepted."""
    gateway = answering()
    status, body = await call(gateway, message(content, **fields), path)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert not gateway.log.requests
    text: str = body["error"]["message"]
    return text


def checked(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each as Anthropic's types have it, under its own name."""
    events: list[dict[str, Any]] = events_of(text)
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    for event in events:
        EVENT.validate_python(event)
    return events


def spelled(events: Sequence[dict[str, Any]]) -> str:
    deltas = (event["delta"] for event in events if event["type"] == "content_block_delta")
    return "".join(delta.get("text", "") for delta in deltas)


async def test_whole_message_has_anthropic_shape() -> None:
    """Input tokens do not include those that a cache had."""
    gateway = answering()
    whole = await created(gateway, temperature=0.5, top_k=7, top_p=0.9)
    assert whole["content"] == [{"type": "text", "text": TEXT, "citations": None}]
    assert (whole["role"], whole["model"], whole["stop_reason"]) == ("assistant", MODEL, "end_turn")
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [whole["usage"][name] for name in counts] == [3, 4, 5]
    (request,) = gateway.log.requests
    assert whole["id"] == f"msg_{request.request_id}"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
    assert sampling.max_tokens == 16


async def test_streamed_message_has_anthropic_events() -> None:
    gateway = answering()
    async with gateway.client() as client:
        response = await client.post(PATH, json=message(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == gateway.log.requests[0].request_id
    events = checked(response.text)
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert spelled(events) == TEXT
    tokens = len(unpack_tokens(gateway.log.requests[0].prompt_tokens))
    assert events[0]["message"]["usage"]["input_tokens"] == tokens
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5
    assert events[-2]["usage"]["cache_read_input_tokens"] == 4


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"finish_reason": "length"}, ("max_tokens", None)),
        (
            {"finish_reason": "length", "prompt_tokens": 510},
            ("model_context_window_exceeded", None),
        ),
        ({"stop_reason": "END"}, ("stop_sequence", "END")),
        ({"stop_reason": "151645"}, ("end_turn", None)),
    ],
)
async def test_message_says_why_it_stopped(end: Any, expected: Any) -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a", "b", **end)
    whole = await created(gateway, stop_sequences=["END"])
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert gateway.log.requests[0].sampling.stop == ("END",)


async def test_answer_is_limited_to_rest_of_context() -> None:
    """Clients of large models ask for more tokens than a small model has."""
    gateway = answering(max_model_len=100)
    await created(gateway, max_tokens=32_000)
    (request,) = gateway.log.requests
    assert request.sampling.max_tokens == 100 - len(unpack_tokens(request.prompt_tokens))


async def test_turns_become_messages_of_chat() -> None:
    """Results come first, turns of one role are joined, and marks of caches leave no trace."""
    gateway = answering()
    marked = {"cache_control": {"type": "ephemeral"}}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=00000;"},
        {"type": "text", "text": "be brief", **marked},
    ]
    turns: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two", **marked}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "foreign"},
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
                {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "go on"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "text of a", **marked},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no path"}],
                    "is_error": True,
                },
            ],
        },
    ]
    await created(gateway, system=system, messages=turns)
    prompt = prompt_of(gateway)
    pieces = (
        "be brief",
        "one\ntwo",
        "I look.",
        '"path": "a"',
        "text of a",
        "Error: no path",
        "go on",
    )
    places = [prompt.index(piece) for piece in pieces]
    assert places == sorted(places)
    assert not any(word in prompt for word in ("billing", "ephemeral", "secret", "foreign"))


async def test_answer_continues_last_turn_of_assistant() -> None:
    gateway = answering()
    turns = [{"role": "user", "content": "where?"}, {"role": "assistant", "content": "At pier"}]
    await created(gateway, messages=turns)
    assert prompt_of(gateway).endswith("At pier")


async def test_next_turn_continues_session() -> None:
    gateway = answering()
    user = {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'}
    first = await created(gateway, metadata=user)
    turns: list[Any] = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "and when?"},
    ]
    await created(gateway, messages=turns, metadata=user)
    first_request, second_request = gateway.log.requests
    assert first_request.session_id == second_request.session_id and second_request.turn == 1


async def test_output_format_binds_answer() -> None:
    gateway = answering('{"pier":', "7}")
    schema = {"type": "object", "properties": {"pier": {"type": "integer"}}}
    form = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    await created(gateway, output_config=form)
    structured = gateway.log.requests[0].sampling.structured
    assert structured is not None and structured.kind is StructuredKind.JSON_SCHEMA


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
TOOL = {"name": "read", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages: expected at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"content": [IMAGE]}, "messages.0.content.0.type: 'image' is not served"),
        ({"content": [{"text": "x"}]}, "messages.0.content.0: expected a block"),
        ({"content": [{"type": "text"}]}, "messages.0.content.0.text"),
        (
            {"content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "x"}]},
            "messages.0.content.0.tool_use_id: expected the id of a tool_use",
        ),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "'web_search_20250305'"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: expected tools"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences: expected at most 16"),
        ({"mcp_servers": [{"type": "url", "url": "http://a"}]}, "mcp_servers: not supported"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"colour": "red"}, "colour: unknown field"),
    ],
)
async def test_bad_input_is_refused(fields: dict[str, Any], expected: str) -> None:
    content = fields.pop("content", "where?")
    assert expected in await refusal(content, **fields)


async def test_call_without_end_of_tool_is_refused() -> None:
    call_block = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    turns: list[Any] = [
        {"role": "user", "content": "read"},
        {"role": "assistant", "content": [call_block]},
    ]
    assert "results of its tools" in await refusal(messages=turns)
    turns[-1]["content"] = [call_block | {"input": "{}"}]
    assert "input: expected an object" in await refusal(messages=turns)


async def test_count_tokens_equals_prompt_of_call() -> None:
    gateway = answering()
    body = message("where is the pier?", system="be brief")
    await created(gateway, "where is the pier?", system="be brief")
    del body["max_tokens"]
    status, counted = await call(gateway, body, COUNT)
    tokens = len(unpack_tokens(gateway.log.requests[0].prompt_tokens))
    assert (status, counted) == (200, {"input_tokens": tokens})
    assert len(gateway.log.requests) == 1, "nothing is generated"
    assert "model" in await refusal(path=COUNT, model=None)


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_prompt_above_context_is_told_in_anthropic_words(path: str) -> None:
    """By these words Claude Code shortens a conversation."""
    assert "prompt is too long" in await refusal("word " * 5_000, path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "alice"}, 200),
        ({"authorization": "Bearer alice"}, 200),
        ({"authorization": "Bearer none", "x-api-key": "alice"}, 200),
        ({"x-api-key": "none"}, 401),
        ({"authorization": "Basic alice"}, 401),
        ({}, 401),
    ],
)
async def test_key_may_be_in_header_of_anthropic(headers: dict[str, str], status: int) -> None:
    gateway = answering(api_keys=("alice", "bob"))
    async with gateway.client() as client:
        call_headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-1,b-2", **headers}
        response = await client.post(PATH + "?beta=true", json=message(), headers=call_headers)
        assert (await client.get("/v1/models", headers=call_headers)).status_code == status
    assert response.status_code == status
    if status == 401:
        body = response.json()
        assert body["error"]["type"] == "authentication_error"
        assert body["request_id"] == response.headers["request-id"]


async def test_errors_have_anthropic_statuses() -> None:
    gateway = answering()
    assert (await call(gateway, message(model="other"), PATH))[0] == 404
    gateway.log.trouble = BrokerUnavailable("away")
    gateway.state.calls.draining = True
    async with gateway.client() as client:
        response = await client.post(PATH, json=message())
    assert (response.status_code, response.headers["retry-after"]) == (529, "1")
    assert response.json()["error"]["type"] == "overloaded_error"
    gateway = answering("a", kind=OutcomeKind.SHED)
    async with gateway.client() as client:
        assert (await client.post(PATH, json=message())).status_code == 529
        foreign = await client.post(PATH, json=message(), headers={"origin": "http://evil"})
    assert foreign.json()["error"]["type"] == "permission_error"


async def test_stream_that_fails_ends_with_error_event() -> None:
    gateway = InProcessGateway()
    error = WireError(code="worker_lost", message="gone", retriable=True)
    async with streamed_call(gateway, message(stream=True), PATH) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, ["a"]))
        await until(lambda: bool(stream.writes))
        end = stream_end(request.request_id, "a", kind=OutcomeKind.FAILED, error=error)
        await gateway.log.push(frame(request.request_id, [], end=end))
        await until(lambda: stream.over)
    last = events_of(stream.text)[-1]
    assert last["error"] == {
        "type": "api_error",
        "message": "gone",
        "details": {"error_code": "worker_lost"},
    }
    assert last["request_id"] == request.request_id


async def test_silent_stream_gets_pings() -> None:
    gateway = InProcessGateway(keepalive_ms=1_000)
    async with streamed_call(gateway, message(stream=True), PATH) as stream:
        await accepted_requests(gateway)
        (waiting,) = gateway.state.calls.hub.calls()
        gateway.state.calls.sweep(waiting.arrived_s + 1.1, 0)
        await until(lambda: bool(stream.writes))
    assert stream.text == 'event: ping\ndata: {"type":"ping"}\n\n'


async def test_stream_resumes_after_each_event_at_second_gateway() -> None:
    """The rest is exact, wherever the client was cut off, on both paths."""
    first = answering()
    second = beside(first)
    async with streamed_call(first, message(stream=True), PATH, **WITH_IDS) as stream:
        await until(lambda: stream.over)
    blocks = [block for block in stream.text.split("\n\n") if block]
    request = first.log.requests[0]
    events_path = f"/v1/requests/msg_{request.request_id}/events"
    for i, event_id in enumerate(stream.ids[:-1]):
        for path, body in ((PATH, message()), (events_path, None)):
            resumed = streamed_call(second, body, path, **{"Last-Event-ID": event_id})
            async with resumed as rest:
                await until(lambda rest=rest: rest.over)
            before = "\n\n".join(blocks[: i + 1]) + "\n\n"
            events = checked(before + rest.text)
            assert spelled(events) == TEXT
            kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
            assert kinds == [
                *("message_start", "content_block_start", "content_block_delta"),
                *("content_block_stop", "message_delta", "message_stop"),
            ]
            assert rest.ids[-1] == stream.ids[-1]


async def test_event_id_of_message_is_cut_within_text() -> None:
    """A client may have a part of what one gateway writes at once."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, message(stream=True), PATH, **WITH_IDS) as stream:
        (request,) = await accepted_requests(gateway)
        answer(gateway, request, ["Pier", " seven", "."])
        await until(lambda: stream.over)
    name, position = stream.ids[2].split(".")
    units = int(position.split("-")[0])
    for cut in range(2, units + 1):
        last_id = f"{name}.{cut}-0-0"
        async with streamed_call(gateway, message(), PATH, **{"Last-Event-ID": last_id}) as rest:
            await until(lambda rest=rest: rest.over)
        assert spelled(checked(rest.text)) == "Pier seven."[cut - 2 :]
