"""Unchanged clients of /v1/responses over a real socket: openai (sync and async) and LangChain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.streams.gateway.in_process import InProcessGateway, serving
from tests.streams.gateway.responses.answering import TEXTS, answer, answering, beside
from tests.streams.gateway.samples import MODEL
from tests.waiting import PATIENCE_S

TOOL: Any = {"type": "file_search", "vector_store_ids": ["handbook"]}
TEXT = "".join(TEXTS)


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int


@contextlib.asynccontextmanager
async def clients(*gateways: InProcessGateway) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """A client of each gateway."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for gateway in gateways:
            url = await stack.enter_async_context(serving(gateway))
            one = openai.AsyncOpenAI(
                base_url=url + "/v1", api_key="key", timeout=PATIENCE_S, max_retries=0
            )
            found.append(await stack.enter_async_context(one))
        yield found


async def test_openai_creates_polls_continues_and_deletes() -> None:
    first = answering(api_keys=("key",))
    second = beside(first, api_keys=("key",))
    async with clients(first, second) as (one, two):
        made = await one.responses.create(model=MODEL, input="where?", background=True)
        assert made.status == "queued"
        polled = await two.responses.retrieve(made.id)
        assert (polled.status, polled.output_text) == ("completed", TEXT)
        assert polled.usage is not None and polled.usage.input_tokens_details.cached_tokens == 4
        cancelled = await two.responses.cancel(made.id)
        assert cancelled.status == "completed", "what has ended stays"
        items = [item async for item in two.responses.input_items.list(made.id)]
        assert [item.type for item in items] == ["message"]
        following = await one.responses.create(
            model=MODEL, input="when?", previous_response_id=made.id
        )
        assert following.output_text == TEXT
        assert len({request.session_id for request in first.log.requests}) == 1
        await two.responses.delete(made.id)
        for client in (one, two):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)


async def test_openai_streams_and_goes_on_elsewhere() -> None:
    first = answering()
    async with clients(first, beside(first)) as (one, two):
        stream = await one.responses.create(model=MODEL, input="where?", stream=True)
        events = [event async for event in stream]
        created = events[0]
        assert created.type == "response.created"
        for after in (0, 3, events[4].sequence_number):
            rest = await two.responses.retrieve(
                created.response.id, stream=True, starting_after=after
            )
            numbers = [event.sequence_number async for event in rest]
            assert numbers == [e.sequence_number for e in events if e.sequence_number > after]


async def test_openai_stream_helper() -> None:
    """With its snapshots, whole, and resumed by id."""
    first = answering()
    async with clients(first, beside(first)) as (one, two):
        async with one.responses.stream(model=MODEL, input="where?", tools=[TOOL]) as stream:
            snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots[-1] == final.output_text == TEXT
        assert [item.type for item in final.output] == ["file_search_call", "message"]
        async with two.responses.stream(response_id=final.id, starting_after=5) as stream:
            kinds = [event.type async for event in stream]
            again = await stream.get_final_response()
        assert again.output_text == TEXT
        assert kinds[0] == "response.output_item.done"


async def test_openai_parses_what_has_a_form() -> None:
    gateway = answering('{"pier"', ": 7}")
    async with clients(gateway) as (one,):
        parsed = await one.responses.parse(model=MODEL, input="where?", text_format=Pier)
        assert parsed.output_parsed == Pier(pier=7)
        async with one.responses.stream(model=MODEL, input="x", text_format=Pier) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == Pier(pier=7)
    assert all(each.sampling.structured is not None for each in gateway.log.requests)


async def test_openai_raises_what_it_should() -> None:
    async with clients(answering()) as (one,):
        with pytest.raises(openai.BadRequestError, match="no other tools"):
            await one.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
        with pytest.raises(openai.NotFoundError, match="not known"):
            await one.responses.retrieve("resp_none")


async def test_openai_sync() -> None:
    async with serving(answering()) as url:

        def talk() -> tuple[str, str]:
            with openai.OpenAI(base_url=url + "/v1", api_key="key", timeout=PATIENCE_S) as client:
                made = client.responses.create(model=MODEL, input="where?")
                stream = client.responses.create(
                    model=MODEL, input="and?", previous_response_id=made.id, stream=True
                )
                deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
                return made.output_text, "".join(deltas)

        assert await asyncio.to_thread(talk) == (TEXT, TEXT)


async def test_an_agent_sends_back_all_that_it_got() -> None:
    """Items of an answer are input of the next call, citations and searches with them."""
    gateway = answering()
    async with clients(gateway) as (one,):
        items: list[Any] = [{"role": "user", "content": "where?"}]
        for _ in range(3):
            made = await one.responses.create(
                model=MODEL, input=items, tools=[TOOL], include=["file_search_call.results"]
            )
            message = made.output[1]
            assert message.type == "message" and message.content[0].type == "output_text"
            (citation, _) = message.content[0].annotations
            assert citation.type == "file_citation" and citation.file_id == "ferry"
            items += [item.model_dump(exclude_none=True) for item in made.output]
            items.append({"role": "user", "content": "and then?"})
    turns = [request.turn for request in gateway.log.requests]
    assert turns == [0, 1, 2]
    assert len({request.session_id for request in gateway.log.requests}) == 1


@pytest.mark.parametrize("by_id", [False, True])
async def test_langchain(by_id: bool) -> None:
    """Its whole answers, streams, searches and next turns, by their words or by id."""
    from langchain_openai import ChatOpenAI  # slow to import

    gateway = answering()
    gateway.log.on_request = lambda request: answer(gateway, request)
    async with serving(gateway) as url, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        chat = ChatOpenAI(
            base_url=url + "/v1",
            api_key="key",
            model=MODEL,
            http_async_client=http,
            use_responses_api=True,
            use_previous_response_id=by_id,
        )
        first = await chat.ainvoke([("system", "be brief"), ("user", "where?")])
        assert first.text == TEXT
        assert first.usage_metadata["input_token_details"]["cache_read"] == 4
        bound = chat.bind_tools([TOOL])
        second = await bound.ainvoke([("user", "where?"), first, ("user", "and when?")])
        cited = second.content[-1]["annotations"]
        assert [each["file_id"] for each in cited] == ["ferry", "map"]
        chunks = [chunk async for chunk in chat.astream([("user", "where?")])]
        assert "".join(chunk.text for chunk in chunks) == TEXT
        formed = chat.with_structured_output(Pier, method="json_schema")
        gateway.log.on_request = lambda request: answer(gateway, request, ['{"pier":', "7}"])
        assert await formed.ainvoke("where?") == Pier(pier=7)
    one, two, *_ = gateway.log.requests
    assert (one.session_id == two.session_id) is by_id
