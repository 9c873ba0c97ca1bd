"""file_search: a search before the answer, its item, its events and its citations."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Request, StreamRetrieved, WireError
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.responses.answering import (
    PASSAGES,
    RESPONSE,
    TEXTS,
    answering,
    beside,
    body,
    checked,
    spelled,
)
from tests.streams.gateway.samples import MODEL, ended, frame
from tests.waiting import until

PATH = "/v1/responses"
TOOL = {"type": "file_search", "vector_store_ids": ["handbook"]}
RESULTS = "file_search_call.results"
EQ: dict[str, Any] = {"type": "eq", "key": "site", "value": "harbour"}
GT: dict[str, Any] = {"type": "gt", "key": "year", "value": 2020}


async def asked(**fields: Any) -> tuple[Request, Any]:
    """The request that a call becomes, and its answer."""
    gateway = answering()
    status, found = await call(gateway, {**body(), "tools": [TOOL], **fields}, PATH)
    assert status == 200, found
    RESPONSE.validate_python(found)
    return gateway.log.requests[0], found


async def test_a_tool_becomes_a_search() -> None:
    tool = {
        **TOOL,
        "max_num_results": 4,
        "filters": {"type": "and", "filters": [EQ, GT]},
        "ranking_options": {"ranker": "auto", "score_threshold": 0.3},
    }
    request, found = await asked(tools=[tool])
    wished = request.retrieval
    assert wished is not None
    assert (wished.collection, wished.query, wished.k, wished.min_score) == (
        *("handbook", "where?", 4, 0.3),
    )
    expression = {"$and": [{"site": {"$eq": "harbour"}}, {"year": {"$gt": 2020}}]}
    assert json.loads(wished.filter) == expression
    assert found["tools"] == [tool]


async def test_an_answer_cites_what_was_found() -> None:
    """Each document once, and the passages where they are asked for."""
    _, found = await asked(include=[RESULTS])
    search, message = found["output"]
    assert (search["type"], search["status"]) == ("file_search_call", "completed")
    assert search["queries"] == ["where?"]
    told = [
        (result["file_id"], result["filename"], result["score"]) for result in search["results"]
    ]
    assert told == [("ferry", "Ferries", 0.9), ("ferry", "Ferries", 0.5), ("map", "map.md", 0.4)]
    assert search["results"][0]["text"] == PASSAGES[0].text
    end = len("".join(TEXTS))
    assert message["content"][0]["annotations"] == [
        {"type": "file_citation", "file_id": "ferry", "filename": "Ferries", "index": end},
        {"type": "file_citation", "file_id": "map", "filename": "map.md", "index": end},
    ]
    assert found["usage"]["input_tokens_details"]["retrieved_tokens"] == 9
    _, found = await asked()
    assert found["output"][0]["results"] is None


async def test_a_model_with_a_collection_searches_too() -> None:
    request, found = await asked(model=f"{MODEL}@handbook", tools=[])
    assert request.retrieval is not None and request.retrieval.collection == "handbook"
    assert [item["type"] for item in found["output"]] == ["file_search_call", "message"]


async def test_a_tool_that_is_not_chosen_is_not_used() -> None:
    request, found = await asked(tool_choice="none")
    assert request.retrieval is None
    assert [item["type"] for item in found["output"]] == ["message"]
    request, _ = await asked(tool_choice={"type": "file_search"})
    assert request.retrieval is not None


async def test_a_search_has_its_events_and_a_stream_goes_on_after_each() -> None:
    """At another gateway, from numbers that follow from the log."""
    gateway = answering()
    wished = body(stream=True, tools=[TOOL], include=[RESULTS])
    async with gateway.client() as client:
        events = checked((await client.post(PATH, json=wished)).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "file_search_call.in_progress"),
        *("file_search_call.searching", "file_search_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.annotation.added", "output_text.annotation.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    whole = events[-1]["response"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == [
        *whole["output"]
    ]
    cited = [event["annotation"] for event in events if "annotation" in event]
    assert cited == whole["output"][1]["content"][0]["annotations"]
    other = beside(gateway)
    for i, event in enumerate(events):
        query = f"stream=true&starting_after={event['sequence_number']}"
        async with other.client() as client:
            rest = checked((await client.get(f"{PATH}/{whole['id']}?{query}")).text)
        assert spelled([*events[: i + 1], *rest]) == "".join(TEXTS)
        assert [e for e in rest if "delta" not in e] == [
            e for e in events[i + 1 :] if "delta" not in e
        ]


async def test_a_search_that_failed_says_so_and_the_answer_goes_on() -> None:
    gateway = InProcessGateway()

    def answer(request: Request) -> None:
        name = request.request_id
        error = WireError(code="deadline_exceeded", message="late", retriable=True)
        told = StreamRetrieved(request_id=name, collection="handbook", error=error)
        one = frame(name, TEXTS, end=ended(name, TEXTS))
        gateway.log.hub.apply(replace(one, retrieved=[told]), 0)

    gateway.log.on_request = answer
    status, found = await call(gateway, body(tools=[TOOL]), PATH)
    assert (status, found["status"], found["output"][0]["status"]) == (200, "completed", "failed")
    assert found["output"][1]["content"][0]["annotations"] == []
    await until(lambda: not gateway.state.in_flight)


WRONG: list[Any] = [
    {},
    [],
    {"type": "eq", "key": "a"},
    {"type": "eq", "key": "$or", "value": 1},
    {"type": "eq", "key": 3, "value": 1},
    {"type": "like", "key": "a", "value": 1},
    {"type": "and", "filters": []},
    {"type": "and", "filters": [3]},
    {"type": "or", "filters": [EQ], "key": "a"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: str(each)[:40])
async def test_filters_that_mean_nothing_are_refused(wrong: Any) -> None:
    gateway = answering()
    status, found = await call(gateway, body(tools=[TOOL | {"filters": wrong}]), PATH)
    assert status == 400 and found["error"]["param"] == "tools.0.filters", found
    assert not gateway.log.sent


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"max_num_results": 51}, "tools.0.max_num_results: expected"),
        ({"max_num_results": 0}, "tools.0.max_num_results: expected"),
        ({"vector_store_ids": []}, "tools.0.vector_store_ids: expected"),
        ({"vector_store_ids": ["a/b"]}, "retrieval.collection"),
        ({"filters": {"type": "x"}}, "tools.0.filters: expected"),
        ({"ranking_options": {"score_threshold": 2}}, "score_threshold: expected"),
        (
            {"ranking_options": {"hybrid_search": {"text_weight": 1}}},
            "hybrid_search: not supported",
        ),
        ({"what": 1}, "tools.0.what: not supported"),
    ],
)
async def test_tools_that_cannot_be_right_are_refused(tool: dict[str, Any], message: str) -> None:
    gateway = answering()
    status, found = await call(gateway, body(tools=[TOOL | tool]), PATH)
    assert status == 400 and message in found["error"]["message"], found
    assert not gateway.log.sent
