"""Streams as clients read them that know nothing but OpenAI's: benchmarks, and what was copied of
them. Each reader here finds its events as one of them does.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from schemas.records import OutcomeKind, Request
from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.samples import chat, completion, frame, stream_end
from tests.streams.gateway.streamed_call import WITH_IDS, accepted_requests, streamed_call
from tests.waits import until

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What `str.splitlines` ends a line at stands in it, as documents of Windows and of the web have it.
PIECES = ["a\u2028b", "\x85", "c\u2029 ", "d\r\n\x1c", "\x0b\x0c €"]


def by_blank_lines(text: str) -> list[str]:
    """`vllm bench serve`."""
    events = [event.strip() for event in text.split("\n\n")]
    return [event.removeprefix("data: ") for event in events if event]


def by_bytes_of_lines(text: str) -> list[str]:
    """sglang's bench_serving, and its many copies."""
    lines = [line.strip().decode() for line in text.encode().split(b"\n")]
    return [line.removeprefix("data: ") for line in lines if line]


def by_lines(text: str) -> list[str]:
    """Who takes its lines from `httpx`, `requests` or `str.splitlines`, as guidellm."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line]


def by_length(text: str) -> list[str]:
    """llmperf, which cuts six characters off each line."""
    return [line[6:] for line in text.splitlines() if line.strip()]


READERS = [by_blank_lines, by_bytes_of_lines, by_lines, by_length]


def answering(*texts: str, **end: Any) -> InProcessGateway:
    """A gateway whose answers come in two frames."""
    gateway = InProcessGateway()

    def answer(request: Request) -> None:
        name, last = request.request_id, stream_end(request.request_id, texts, **end)
        chars, seq = len("".join(texts[:-1])), len(texts) - 1
        gateway.log.hub.apply(frame(name, [*texts[:-1]]), 0.0)
        gateway.log.hub.apply(frame(name, [texts[-1]], first_seq=seq, first_char=chars), 0.0)
        gateway.log.hub.apply(frame(name, [], end=last), 0.0)

    gateway.log.on_request = answer
    return gateway


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat()),
        (CHATS, chat(n=2, stream_options={"include_usage": True})),
        (CHATS, chat(return_token_ids=True)),
        (COMPLETIONS, completion()),
        (COMPLETIONS, completion(n=2, stream_options={"include_usage": True})),
    ],
)
async def test_benchmark_readers_parse_every_event(
    read: Callable[[str], list[str]], path: str, body: dict[str, Any]
) -> None:
    """No event begins with an id, and no text ends a line."""
    gateway = answering(*PIECES)
    async with serving(gateway) as url, http_client(url) as client:
        response = await client.post(path, json={**body, "stream": True})
    *events, end_marker = read(response.text)
    assert end_marker == "[DONE]"
    texts = ["", ""]
    for event in map(json.loads, events):
        for choice in event["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                "content", ""
            )
    assert texts[: body.get("n", 1)] == ["".join(PIECES)] * body.get("n", 1)


@pytest.mark.parametrize("read", READERS)
async def test_benchmark_readers_parse_error_in_stream(read: Callable[[str], list[str]]) -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, ["a"]))
        await until(lambda: bool(stream.writes))
        end = stream_end(request.request_id, "a", kind=OutcomeKind.CANCELLED)
        await gateway.log.push(frame(request.request_id, [], end=end))
        await until(lambda: stream.over)
    role, text, error = map(json.loads, read(stream.text))
    assert error["error"]["code"] == "cancelled"


async def test_response_stream_lines_are_whole_events() -> None:
    """Events of this endpoint have names."""
    gateway = answering(*PIECES)
    body = {"model": "test-model", "input": "hello", "stream": True}
    async with serving(gateway) as url, http_client(url) as client:
        lines = (await client.post("/v1/responses", json=body)).text.splitlines()
    kinds = {line.partition(":")[0] for line in lines if line}
    assert kinds == {"event", "data"}
    deltas = [json.loads(line[6:]).get("delta", "") for line in lines if line.startswith("data: ")]
    assert "".join(deltas) == "".join(PIECES)


@pytest.mark.parametrize(
    ("headers", "has_ids"),
    [
        ({}, False),
        (WITH_IDS, True),
        ({"X-Trivium-On-Disconnect": "continue"}, True),
        ({"X-Trivium-On-Disconnect": "cancel"}, False),
        ({"X-Trivium-On-Disconnect": "continue", "X-Trivium-Event-Ids": "false"}, False),
    ],
)
async def test_stream_has_event_ids_only_on_request(headers: dict[str, str], has_ids: bool) -> None:
    gateway = answering("a", "b")
    async with gateway.client() as client:
        response = await client.post(CHATS, json=chat(stream=True), headers=headers)
        wrong = await client.post(CHATS, json=chat(), headers={"X-Trivium-Event-Ids": "yes"})
    events = response.text.split("\n\n")[:-2]  # [DONE] is none
    assert len(events) == 3, "role, text, and the reason of the end"
    assert [event.startswith("id: ") for event in events] == [has_ids] * len(events)
    assert "expected false or true, found 'yes'" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHATS, "/v1/responses"])
async def test_plain_stream_sends_no_keepalive(path: str) -> None:
    """A comment is no JSON for benchmarks, and an event without data for `openai` in Go."""
    gateway = InProcessGateway(keepalive_ms=1)
    body = chat() if path == CHATS else {"model": "test-model", "input": "hello"}
    async with streamed_call(gateway, {**body, "stream": True}, path) as stream:
        (request,) = await accepted_requests(gateway)
        (call,) = gateway.state.calls.hub.calls()
        gateway.state.calls.sweep(call.last_activity_s + 1, 0)
        await until(lambda: not call.keepalive_due)
        await gateway.log.push(
            frame(request.request_id, ["a"], end=stream_end(request.request_id, "a"))
        )
        await until(lambda: stream.over)
    assert not [line for line in stream.text.splitlines() if line.startswith(":")]


async def test_httpx_reads_stream_by_lines() -> None:
    """Most clients read line by line while the stream arrives."""
    async with serving(answering(*PIECES)) as url, http_client(url) as client:
        async with client.stream("POST", CHATS, json=chat(stream=True)) as response:
            lines = [line async for line in response.aiter_lines() if line]
    assert [line.partition(": ")[0] for line in lines] == ["data"] * len(lines)
