"""Usage in streams: asked for, by a setting, and in every event."""

from typing import Any

import openai
import pytest

from tests.streams.gateway.in_process import InProcessGateway, call, serving
from tests.streams.gateway.samples import MODEL, chat, completion, events_of, frame, stream_end
from tests.streams.gateway.streamed_call import streamed_call
from tests.waits import PATIENCE_S, until


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_continuous_usage_stats_count_every_event(path: str) -> None:
    """Benchmarks ask for vLLM's `continuous_usage_stats`; it needs `include_usage`."""
    for include in (True, False):
        gateway = InProcessGateway()
        body = chat("hello") if "chat" in path else completion([5, 6])
        options = {"include_usage": include, "continuous_usage_stats": True}
        stream_body = {**body, "stream": True, "stream_options": options}
        async with streamed_call(gateway, stream_body, path) as streaming:
            await gateway.log.wait_sent(1)
            name = gateway.log.requests[0].request_id
            for seq, text in enumerate("ab"):
                written = len(streaming.writes)
                await gateway.log.push(frame(name, [text], first_seq=seq, first_char=seq))
                await until(lambda n=written: len(streaming.writes) > n)
            await gateway.log.push(frame(name, [], end=stream_end(name, ["a", "b"])))
            await until(lambda: streaming.over)
        usages = [event.get("usage") for event in events_of(streaming.text)[:-1]]
        is_chat = "chat" in path  # whose first event names the role alone
        if not include:
            assert usages == [None] * (3 + is_chat)
            continue
        so_far = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages[:-1]]
        counts = [0] * is_chat + [1, 2, 2]
        assert so_far == [(5 if is_chat else 2, count) for count in counts]
        assert usages[-1]["completion_tokens"] == 2


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_stream_has_usage_by_setting(path: str, options: Any) -> None:
    """A proxy that counts tokens reads them from streams whose clients do not ask for them."""
    body = chat("hello") if "chat" in path else completion([5, 6])
    for setting in ("asked", "always"):
        gateway = InProcessGateway(include_usage=setting)
        gateway.answer_with("a", "b")
        _, whole = await call(gateway, body, path)
        fields = {} if options is None else {"stream_options": options}
        async with gateway.client() as client:
            response = await client.post(path, json={**body, "stream": True, **fields})
        *events, last, mark = events_of(response.text)
        assert mark == "[DONE]"
        if setting == "always":
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
            assert {event["usage"] for event in events} == {None}
        else:
            assert last["choices"] and not any("usage" in event for event in [*events, last])


async def test_setting_lets_call_count_every_event() -> None:
    gateway = InProcessGateway(include_usage="always")
    gateway.answer_with("a", "b")
    body = chat("hello", stream=True, stream_options={"continuous_usage_stats": True})
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=body)
    usages = [event["usage"]["completion_tokens"] for event in events_of(response.text)[:-1]]
    assert usages[0] == 0 and usages[-1] == 2


async def test_openai_client_reads_usage_that_it_did_not_ask_for() -> None:
    gateway = InProcessGateway(include_usage="always")
    gateway.answer_with("a", "b")
    async with serving(gateway) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S
        ) as client:
            async with client.chat.completions.stream(
                model=MODEL, messages=[{"role": "user", "content": "hello"}]
            ) as stream:
                answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "ab"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
