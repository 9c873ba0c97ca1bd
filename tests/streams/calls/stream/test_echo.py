"""Completions that repeat their prompt before the answer."""

from typing import Any

import openai
import pytest

from tests.streams.gateway.in_process import InProcessGateway, call, serving
from tests.streams.gateway.samples import MODEL, completion, events_of, frame, stream_end
from tests.streams.gateway.streamed_call import (
    WITH_IDS,
    accepted_requests,
    streamed_call,
    whole_stream,
)
from tests.waits import PATIENCE_S, until

PATH = "/v1/completions"
TEXTS = ["lo", " you"]


def answering(**settings: Any) -> InProcessGateway:
    gateway = InProcessGateway(**settings)
    gateway.answer_with(*TEXTS)
    return gateway


def by_choice(events: list[Any]) -> dict[int, str]:
    """Return the text of each choice."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def ids_of(text: str) -> Any:
    _, answer = await call(InProcessGateway(), {"prompt": text}, "/tokenize")
    return answer["tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "echoes"),
    [
        ({"prompt": "hel "}, ["hel "]),
        ({"prompt": ["hel", "the second"], "n": 2}, ["hel", "hel", "the second", "the second"]),
        ({"prompt": "</s>hel\u2028"}, ["</s>hel\u2028"]),
        ({"prompt": "one two", "truncate_prompt_tokens": 4}, [" two"]),
        ({"prompt": "hel", "stream_options": None, "return_token_ids": True}, ["hel"]),
    ],
)
async def test_echo_precedes_each_answer(
    stream: bool, fields: dict[str, Any], echoes: list[str]
) -> None:
    body = completion(echo=True, stream=stream, **fields)
    async with answering().client() as client:
        response = await client.post(PATH, json=body)
    answers = events_of(response.text) if stream else [response.json()]
    expected = [echo + "".join(TEXTS) for echo in echoes]
    assert by_choice(answers) == dict(enumerate(expected)), response.text
    if "return_token_ids" in fields:  # vLLM has the prompt's ids in the first event
        first = answers[0]["choices"][0]
        assert first["prompt_token_ids"] == await ids_of("hel")


async def test_echo_of_token_ids_is_their_text() -> None:
    ids = await ids_of("hello you")
    for prompt in (ids, [ids]):
        _, answer = await call(answering(), completion(prompt, echo=True), PATH)
        assert answer["choices"][0]["text"] == "hello you" + "".join(TEXTS)
        assert answer["usage"]["completion_tokens"] == len(TEXTS)


async def test_stream_of_answer_without_text_has_echo() -> None:
    gateway = InProcessGateway()
    gateway.answer_with()
    body = completion("hel", echo=True, stream=True, stream_options={"include_usage": True})
    async with gateway.client() as client:
        events = events_of((await client.post(PATH, json=body)).text)
    assert by_choice(events) == {0: "hel"} and events[-1] == "[DONE]"
    assert [event["usage"] for event in events[:2]] == [None, None]


async def test_failed_call_has_error_and_no_echo() -> None:
    gateway = InProcessGateway()
    gateway.answer_with(kind="failed")
    async with gateway.client() as client:
        response = await client.post(PATH, json=completion("hel", echo=True, stream=True))
    assert response.status_code == 500


@pytest.mark.parametrize("n", [1, 3])
async def test_resumed_stream_lacks_no_echo_and_repeats_none(n: int) -> None:
    """The other gateway does not know the prompt, so no event before the last echo has an id."""
    first = InProcessGateway()
    body = completion("hel", echo=True, stream=True, n=n)
    stream = await whole_stream(first, body, TEXTS, PATH)
    whole = events_of(stream.text)
    assert by_choice(whole) == dict.fromkeys(range(n), "hello you")
    assert len(stream.ids) == len(whole) - len(["[DONE]"]) - (n - 1)
    second = InProcessGateway(partition=1)
    second.log.frames = first.log.frames
    for i, event_id in enumerate(stream.ids, n - 1):
        async with second.client() as client:
            path = f"/v1/requests/{stream.headers['x-request-id']}/events"
            response = await client.get(path, headers={"Last-Event-ID": event_id})
        rest = events_of(response.text)
        assert by_choice([*whole[: i + 1], *rest]) == by_choice(whole)


async def test_own_gateway_repeats_echo_to_client_without_event() -> None:
    gateway = InProcessGateway()
    body = completion("hel", echo=True, stream=True)
    async with streamed_call(gateway, body, PATH, **WITH_IDS):
        (request,) = await accepted_requests(gateway)
        path = f"/v1/requests/{request.request_id}/events"
        async with streamed_call(gateway, path=path) as follower:
            await until(lambda: len(gateway.state.calls.resumed) == 1)
            end = stream_end(request.request_id, TEXTS)
            await gateway.log.push(frame(request.request_id, TEXTS, end=end))
            await until(lambda: follower.over)
    assert by_choice(events_of(follower.text)) == {0: "hello you"}


async def test_echo_with_logprobs_is_refused_with_reason() -> None:
    for logprobs in (0, 3):
        gateway = answering()
        status, answer = await call(gateway, completion(echo=True, logprobs=logprobs), PATH)
        assert (status, answer["error"]["param"]) == (400, "echo")
        assert "log-probabilities of a prompt are not computed" in answer["error"]["message"]
        assert not gateway.log.requests


async def test_openai_client_reads_echo() -> None:
    async with serving(answering()) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="x", timeout=PATIENCE_S
        ) as client:
            answer = await client.completions.create(model=MODEL, prompt="hel", echo=True)
            assert answer.choices[0].text == "hello you"
            stream = await client.completions.create(
                model=MODEL, prompt="hel", echo=True, stream=True
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello you"
