"""Whole answers: their form, choices, log-probabilities, sessions, and errors."""

from typing import Any

import pytest

from schemas.records import (
    OutcomeKind,
    Priority,
    StreamLogprobs,
    TokenLogprob,
    TopLogprob,
    WireError,
)
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, completion, events_of, frame, stream_end


async def test_whole_chat_answer_has_openai_shape() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("Hel", "lo")
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=chat("hé"))
    (request,) = gateway.log.requests
    answer = response.json()
    assert answer["id"] == "chatcmpl-" + request.request_id
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "reasoning": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert response.headers["x-request-id"] == request.request_id
    assert response.headers["x-session-id"] == request.session_id
    assert response.headers["x-trivium-mode"] == "remote"
    assert response.headers["x-trivium-prefill-worker"] == "prefill-1"
    assert response.headers["x-trivium-decode-worker"] == "decode-1"


async def test_headers_set_session_priority_and_deadline() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    await call(gateway, chat(), x_session_id="mine", x_priority="interactive", x_deadline_ms="1500")
    (request,) = gateway.log.requests
    assert request.session_id == "mine"
    assert request.priority is Priority.INTERACTIVE
    assert request.deadline_ms == request.arrived_ms + 1_500


async def test_second_turn_continues_session_of_first() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("Hel", "lo")
    await call(gateway, chat("a"))
    await call(gateway, chat("a"))
    messages = [*chat("a")["messages"], {"role": "assistant", "content": "Hello"}]
    messages.append({"role": "user", "content": "b"})
    await call(gateway, {"model": MODEL, "messages": messages})
    first, second, third = gateway.log.requests
    assert first.session_id != second.session_id
    assert third.session_id in (first.session_id, second.session_id)


async def test_choices_become_requests_with_own_seeds() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a", "b")
    status, answer = await call(gateway, chat(n=3, seed=10))
    assert status == 200
    parent = gateway.log.requests[0].parent_id
    assert [r.request_id for r in gateway.log.requests] == [f"{parent}-{i}" for i in range(3)]
    assert [r.choice for r in gateway.log.requests] == [0, 1, 2]
    assert [r.sampling.seed for r in gateway.log.requests] == [10, 11, 12]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 6


async def test_prompts_of_completion_become_choices_in_order() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a")
    status, answer = await call(gateway, completion([[5, 6], [7]], n=2), "/v1/completions")
    assert status == 200
    prompts = [unpack_tokens(r.prompt_tokens) for r in gateway.log.requests]
    assert prompts == [[5, 6], [5, 6], [7], [7]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 14
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "a"


@pytest.mark.parametrize(("names_ids", "name"), [(None, "é"), (False, "é"), (True, "token_id:1")])
async def test_logprobs_have_chat_and_completion_shapes(names_ids: bool | None, name: str) -> None:
    top = [TopLogprob(token_id=1, token="é", logprob=-0.5)]
    tokens = [TokenLogprob(token_id=1, token="é", logprob=-0.5, top=top)]
    for path, body in (
        ("/v1/chat/completions", chat(logprobs=True, top_logprobs=1)),
        ("/v1/completions", completion(logprobs=1)),
    ):
        gateway = InProcessGateway()
        log = gateway.log

        def answer(request: Any, log: Any = log) -> None:
            rows = StreamLogprobs(
                request_id=request.request_id, attempt=1, first_seq=0, tokens=tokens
            )
            end = stream_end(request.request_id, ["é"])
            log.hub.apply(frame(request.request_id, ["é"], end=end, logprobs=[rows]), 0.0)

        log.on_request = answer
        body["return_tokens_as_token_ids"] = names_ids
        _, body_of_answer = await call(gateway, body, path)
        form = body_of_answer["choices"][0]["logprobs"]
        if "chat" in path:
            token_entry = {"token": name, "logprob": -0.5, "bytes": [*name.encode()]}
            assert form == {"content": [{**token_entry, "top_logprobs": [token_entry]}]}
        else:
            assert form == {
                "tokens": [name],
                "token_logprobs": [-0.5],
                "top_logprobs": [{name: -0.5}],
                "text_offset": [0],
            }


async def test_completion_logprobs_include_sampled_token() -> None:
    """The sampled token is listed even for `logprobs: 0`."""
    gateway = InProcessGateway()
    sampled_token = TokenLogprob(token_id=1, token="a", logprob=-2.0, top=[])
    top = [TopLogprob(token_id=2, token="b", logprob=-0.5)]
    tokens = [sampled_token, TokenLogprob(token_id=1, token="c", logprob=-3.0, top=top)]

    def answer(request: Any) -> None:
        rows = StreamLogprobs(request_id=request.request_id, attempt=1, first_seq=0, tokens=tokens)
        end = stream_end(request.request_id, ["a", "c"])
        gateway.log.hub.apply(frame(request.request_id, ["a", "c"], end=end, logprobs=[rows]), 0.0)

    gateway.log.on_request = answer
    _, answered = await call(gateway, completion(logprobs=0), "/v1/completions")
    form = answered["choices"][0]["logprobs"]
    assert form["top_logprobs"] == [{"a": -2.0}, {"b": -0.5, "c": -3.0}]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_returns_token_ids_of_prompt(stream: bool) -> None:
    """As in vLLM: once per choice of a completion, beside a chat; prompt logprobs are null."""
    gateway = InProcessGateway()
    gateway.answer_with("a", "b")
    fields = {"return_token_ids": True, "stream": stream}
    calls: list[tuple[str, dict[str, Any], list[list[int]]]] = [
        ("/v1/chat/completions", chat("hello", **fields), [[0, 3, 275, 1, 4]]),
        ("/v1/completions", completion([[5, 6], [7]], n=2, **fields), [[5, 6], [5, 6], [7], [7]]),
    ]
    for path, body, prompts in calls:
        async with gateway.client() as client:
            response = await client.post(path, json=body)
        chunks = events_of(response.text)[:-1] if stream else [response.json()]
        prompt_ids: dict[int, list[Any]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                holder = chunk if "chat" in path else choice
                prompt_ids.setdefault(choice["index"], []).append(holder.get("prompt_token_ids"))
                assert stream or holder["prompt_logprobs"] is None
        assert [prompt_ids[i][0] for i in range(len(prompts))] == prompts
        assert not any(later for ids in prompt_ids.values() for later in ids[1:])


async def test_answer_hides_token_ids_of_prompt_with_passages() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a")
    body = chat("hello", return_token_ids=True, retrieval={"collection": "c"})
    _, answer = await call(gateway, body)
    assert answer["prompt_token_ids"] is None and answer["choices"][0]["token_ids"] == [100]


@pytest.mark.parametrize(
    ("kind", "error", "status", "code"),
    [
        (OutcomeKind.SHED, None, 429, "queue_full"),
        (OutcomeKind.EXPIRED, None, 504, "deadline_exceeded"),
        (OutcomeKind.CANCELLED, None, 499, "cancelled"),
        (OutcomeKind.FAILED, None, 500, "engine_failed"),
        (OutcomeKind.FAILED, WireError(code="worker_lost", message="gone"), 502, "worker_lost"),
        (
            OutcomeKind.FAILED,
            WireError(code="invalid_request", message="x"),
            400,
            "invalid_request",
        ),
        (OutcomeKind.FAILED, WireError(code="of the future", message="x"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failed_outcome_maps_to_error_status(
    kind: OutcomeKind, error: WireError | None, status: int, code: str, stream: bool
) -> None:
    gateway = InProcessGateway()
    gateway.answer_with(kind=kind, error=error)
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert response.headers["x-session-id"] == gateway.log.requests[0].session_id
    assert gateway.state.calls.in_flight == 0
    assert not gateway.log.cancellations
