"""Unchanged clients over a real socket: openai (sync and async) and LangChain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from schemas.records import OutcomeKind
from tests.streams.gateway.in_process import InProcessGateway, serving
from tests.streams.gateway.samples import MODEL, frame, stream_end
from tests.streams.gateway.streamed_call import WITH_IDS
from tests.waits import PATIENCE_S, until

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


def talking(**end: Any) -> InProcessGateway:
    gateway = InProcessGateway(api_keys=("key",))
    gateway.answer_with("Hel", "lo", **end)
    return gateway


async def test_openai_async_client_chats_streams_and_lists_models() -> None:
    async with serving(talking()) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S
        ) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
            assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 4
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Hello"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 2
            assert [model.id async for model in client.models.list()] == [MODEL]
            model = await client.models.retrieve(MODEL)
            assert model.model_extra is not None
            assert (model.id, model.model_extra["root"]) == (MODEL, MODEL)
            assert model.model_extra["permission"][0]["allow_sampling"] is True
            old = await client.completions.create(model=MODEL, prompt="hello", logprobs=None)
            assert old.choices[0].text == "Hello"


async def test_openai_sync_client_streams_chat() -> None:
    async with serving(talking()) as url:

        def talk() -> str:
            with openai.OpenAI(base_url=url + "/v1", api_key="key", timeout=PATIENCE_S) as client:
                stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert await asyncio.to_thread(talk) == "Hello"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "no"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
    ],
)
async def test_openai_client_raises_matching_error(fields: Any, error: type[Exception]) -> None:
    async with serving(talking()) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S
        ) as client:
            with pytest.raises(error):
                await client.chat.completions.create(
                    **{"model": MODEL, "messages": MESSAGES, **fields}
                )
        wrong = openai.AsyncOpenAI(base_url=url + "/v1", api_key="no", timeout=PATIENCE_S)
        async with wrong as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_openai_client_raises_rate_limit_error_when_shed() -> None:
    gateway = talking(kind=OutcomeKind.SHED)
    async with serving(gateway) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S, max_retries=0
        ) as client:
            with pytest.raises(openai.RateLimitError, match="too many requests are waiting"):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)


async def test_langchain_client_chats_streams_and_batches() -> None:
    from langchain_openai import ChatOpenAI  # slow to import

    async with serving(talking()) as url, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        chat = ChatOpenAI(
            base_url=url + "/v1",
            api_key="key",
            timeout=PATIENCE_S,
            model=MODEL,
            max_tokens=9,
            http_async_client=http,
            stream_usage=True,
        )
        answer = await chat.ainvoke("hello")
        assert answer.content == "Hello"
        assert answer.usage_metadata["input_token_details"] == {"cache_read": 4}
        chunks = [chunk async for chunk in chat.astream([("user", "hello")])]
        assert "".join(chunk.content for chunk in chunks) == "Hello"
        answers = await chat.abatch(["a", "b"])
        assert [answer.content for answer in answers] == ["Hello", "Hello"]


@contextlib.asynccontextmanager
async def pausing() -> AsyncIterator[str]:
    """A gateway whose next answer is silent twice before its first token, between the two that it
    has, and before its end; gives its URL.
    """
    gateway = InProcessGateway(keepalive_ms=1)

    async def answer() -> None:
        await gateway.log.wait_sent(1)
        (call,) = gateway.state.calls.hub.calls()
        name = call.key.parent_id
        for next_frame in (
            frame(name, ["Hel"]),
            frame(name, ["lo"], first_seq=1, first_char=3),
            frame(name, [], end=stream_end(name, ["Hel", "lo"])),
        ):
            for _ in range(2):
                gateway.state.calls.sweep(call.last_activity_s + 1, 0)
                await until(lambda: not call.keepalive_due)
            await gateway.log.push(next_frame)

    async with serving(gateway) as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        yield url + "/v1"


async def test_openai_async_client_skips_keepalive_comments() -> None:
    """Keep-alive comments before, between and after tokens end no event."""
    async with (
        pausing() as url,
        openai.AsyncOpenAI(base_url=url, api_key="x", timeout=PATIENCE_S) as ai,
    ):
        stream = await ai.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_headers=WITH_IDS
        )
        texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert texts == ["", "Hel", "lo", None]


async def test_openai_sync_client_skips_keepalive_comments() -> None:
    """The client without asyncio reads the older endpoint."""

    def talk(url: str) -> str:
        with openai.OpenAI(base_url=url, api_key="x", timeout=PATIENCE_S) as ai:
            stream = ai.completions.create(
                model=MODEL, prompt="hello", stream=True, extra_headers=WITH_IDS
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    async with pausing() as url:
        assert await asyncio.to_thread(talk, url) == "Hello"


async def test_langchain_client_skips_keepalive_comments() -> None:
    from langchain_openai import ChatOpenAI  # slow to import

    async with pausing() as url, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        chat = ChatOpenAI(
            base_url=url,
            api_key="x",
            model=MODEL,
            http_async_client=http,
            default_headers=WITH_IDS,
        )
        chunks = [chunk.content async for chunk in chat.astream("hello")]
    assert "".join(chunks) == "Hello"
