"""The model that is served by default, asked with the real OpenAI client."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from infra.stack.launcher import Stack
from tests.conftest import _fresh_topics
from tests.e2e.real_model.stack import real_stack
from workers.models.wheels import SMOLLM2

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(1_800)]

CAPITAL = "What is the capital of France?"


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("real")
    async with real_stack(
        await _fresh_topics(bootstrap), folder, prefill=1, decode=1
    ) as running_stack:
        yield running_stack


@pytest.fixture
async def client(running: Stack) -> AsyncIterator[AsyncOpenAI]:
    url = f"{running.gateway_urls[0]}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=300) as openai_client:
        yield openai_client


async def ask(client: AsyncOpenAI, *turns: str, **fields: Any) -> Any:
    """The choice of one answer; turns are the user's and the assistant's by turns."""
    messages: Any = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(turns)
    ]
    options: dict[str, Any] = {"model": SMOLLM2, "temperature": 0, "max_tokens": 48, **fields}
    answer = await client.chat.completions.create(messages=messages, **options)
    return answer.choices[0]


async def test_default_model_answers_conversation(client: AsyncOpenAI) -> None:
    """The default model is served by name, with its own chat template and end token."""
    assert [model.id for model in (await client.models.list()).data] == [SMOLLM2]
    first = await ask(client, CAPITAL)
    assert "Paris" in first.message.content
    second = await ask(client, CAPITAL, first.message.content, "And of Italy?")
    assert "Rome" in second.message.content
    for choice in (first, second):
        assert choice.finish_reason == "stop"
        assert "<|" not in choice.message.content


async def test_default_model_streams_same_answer_across_pools(client: AsyncOpenAI) -> None:
    whole = await ask(client, CAPITAL)
    text, ends, trivium_fields = "", [], dict[str, Any]()
    stream = await client.chat.completions.create(
        model=SMOLLM2,
        messages=[{"role": "user", "content": CAPITAL}],
        temperature=0,
        max_tokens=48,
        stream=True,
    )
    async for chunk in stream:
        trivium_fields = (chunk.model_extra or {}).get("trivium") or trivium_fields
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ends += [choice.finish_reason] * bool(choice.finish_reason)
    assert (text, ends) == (whole.message.content, ["stop"])
    assert {trivium_fields["prefill_worker"], trivium_fields["decode_worker"]} <= {
        "prefill-0",
        "decode-0",
    }


async def test_default_model_cuts_or_refuses_overlong_requests(client: AsyncOpenAI) -> None:
    """Prompt and answer have 2048 tokens together."""
    cut = await ask(client, CAPITAL, max_tokens=3)
    assert cut.finish_reason == "length"
    with pytest.raises(BadRequestError, match="at most 2047") as refused:
        await ask(client, "word " * 2_100)
    assert refused.value.code == "context_length_exceeded"
