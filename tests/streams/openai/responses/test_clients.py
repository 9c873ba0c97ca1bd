"""Unchanged clients of /v1/responses over a real socket: openai (sync and async) and LangChain."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.streams.gateway.answering import TEXTS, answer, answering, beside
from tests.streams.gateway.in_process import serving, stock_clients
from tests.streams.gateway.samples import MODEL
from tests.waits import PATIENCE_S

TOOL: Any = {"type": "file_search", "vector_store_ids": ["handbook"]}
TEXT = "".join(TEXTS)


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int


async def test_openai_client_creates_polls_continues_and_deletes() -> None:
    first = answering(api_keys=("key",))
    second = beside(first, api_keys=("key",))
    async with stock_clients(first, second) as (first_client, second_client):
        response = await first_client.responses.create(model=MODEL, input="where?", background=True)
        assert response.status == "queued"
        polled = await second_client.responses.retrieve(response.id)
        assert (polled.status, polled.output_text) == ("completed", TEXT)
        assert polled.usage is not None and polled.usage.input_tokens_details.cached_tokens == 4
        cancelled = await second_client.responses.cancel(response.id)
        assert cancelled.status == "completed", "what has ended stays"
        items = [item async for item in second_client.responses.input_items.list(response.id)]
        assert [item.type for item in items] == ["message"]
        following = await first_client.responses.create(
            model=MODEL, input="when?", previous_response_id=response.id
        )
        assert following.output_text == TEXT
        assert len({request.session_id for request in first.log.requests}) == 1
        await second_client.responses.delete(response.id)
        for client in (first_client, second_client):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)


async def test_openai_client_resumes_stream_at_second_gateway() -> None:
    first = answering()
    async with stock_clients(first, beside(first)) as (first_client, second_client):
        stream = await first_client.responses.create(model=MODEL, input="where?", stream=True)
        events = [event async for event in stream]
        created = events[0]
        assert created.type == "response.created"
        for after in (0, 3, events[4].sequence_number):
            rest = await second_client.responses.retrieve(
                created.response.id, stream=True, starting_after=after
            )
            numbers = [event.sequence_number async for event in rest]
            assert numbers == [e.sequence_number for e in events if e.sequence_number > after]


async def test_openai_stream_helper_reads_snapshots_and_resumes() -> None:
    first = answering()
    async with stock_clients(first, beside(first)) as (first_client, second_client):
        async with first_client.responses.stream(
            model=MODEL, input="where?", tools=[TOOL]
        ) as stream:
            snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots[-1] == final.output_text == TEXT
        assert [item.type for item in final.output] == ["file_search_call", "message"]
        async with second_client.responses.stream(response_id=final.id, starting_after=5) as stream:
            kinds = [event.type async for event in stream]
            resumed_response = await stream.get_final_response()
        assert resumed_response.output_text == TEXT
        assert kinds[0] == "response.output_item.done"


async def test_openai_client_parses_structured_output() -> None:
    gateway = answering('{"pier"', ": 7}")
    async with stock_clients(gateway) as (client,):
        parsed = await client.responses.parse(model=MODEL, input="where?", text_format=Pier)
        assert parsed.output_parsed == Pier(pier=7)
        async with client.responses.stream(model=MODEL, input="x", text_format=Pier) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == Pier(pier=7)
    assert all(request.sampling.structured is not None for request in gateway.log.requests)


async def test_openai_client_raises_matching_error() -> None:
    async with stock_clients(answering()) as (client,):
        with pytest.raises(openai.BadRequestError, match="no other tools"):
            await client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
        with pytest.raises(openai.NotFoundError, match="not known"):
            await client.responses.retrieve("resp_none")


async def test_openai_sync_client_creates_and_streams() -> None:
    async with serving(answering()) as url:

        def talk() -> tuple[str, str]:
            with openai.OpenAI(base_url=url + "/v1", api_key="key", timeout=PATIENCE_S) as client:
                response = client.responses.create(model=MODEL, input="where?")
                stream = client.responses.create(
                    model=MODEL, input="and?", previous_response_id=response.id, stream=True
                )
                deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
                return response.output_text, "".join(deltas)

        assert await asyncio.to_thread(talk) == (TEXT, TEXT)


async def test_openai_client_returns_output_items_as_input() -> None:
    """Output items are valid input of the next call, with their citations and searches."""
    gateway = answering()
    async with stock_clients(gateway) as (client,):
        items: list[Any] = [{"role": "user", "content": "where?"}]
        for _ in range(3):
            response = await client.responses.create(
                model=MODEL, input=items, tools=[TOOL], include=["file_search_call.results"]
            )
            message = response.output[1]
            assert message.type == "message" and message.content[0].type == "output_text"
            (citation, _) = message.content[0].annotations
            assert citation.type == "file_citation" and citation.file_id == "ferry"
            items += [item.model_dump(exclude_none=True) for item in response.output]
            items.append({"role": "user", "content": "and then?"})
    turns = [request.turn for request in gateway.log.requests]
    assert turns == [0, 1, 2]
    assert len({request.session_id for request in gateway.log.requests}) == 1


@pytest.mark.parametrize("by_id", [False, True])
async def test_langchain_client_chats_streams_and_searches(by_id: bool) -> None:
    """Next turns continue by their text or by the id of the previous response."""
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
        assert [citation["file_id"] for citation in cited] == ["ferry", "map"]
        chunks = [chunk async for chunk in chat.astream([("user", "where?")])]
        assert "".join(chunk.text for chunk in chunks) == TEXT
        formed = chat.with_structured_output(Pier, method="json_schema")
        gateway.log.on_request = lambda request: answer(gateway, request, ['{"pier":', "7}"])
        assert await formed.ainvoke("where?") == Pier(pier=7)
    first_request, second_request, *_ = gateway.log.requests
    assert (first_request.session_id == second_request.session_id) is by_id
