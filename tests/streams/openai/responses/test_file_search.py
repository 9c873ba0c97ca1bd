"""file_search: a search before the answer, its item, its events and its citations."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Request, StreamRetrieved, WireError
from tests.streams.gateway.answering import (
    PASSAGES,
    RESPONSE,
    TEXTS,
    answering,
    beside,
    body,
    checked,
    spelled,
)
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, frame, stream_end
from tests.waits import until

PATH = "/v1/responses"
TOOL = {"type": "file_search", "vector_store_ids": ["handbook"]}
RESULTS = "file_search_call.results"
EQ: dict[str, Any] = {"type": "eq", "key": "site", "value": "harbour"}
GT: dict[str, Any] = {"type": "gt", "key": "year", "value": 2020}


async def call_with_search(**fields: Any) -> tuple[Request, Any]:
    """The request that a call becomes, and its answer."""
    gateway = answering()
    status, response = await call(gateway, {**body(), "tools": [TOOL], **fields}, PATH)
    assert status == 200, response
    RESPONSE.validate_python(response)
    return gateway.log.requests[0], response


async def test_file_search_tool_becomes_retrieval() -> None:
    tool = {
        **TOOL,
        "max_num_results": 4,
        "filters": {"type": "and", "filters": [EQ, GT]},
        "ranking_options": {"ranker": "auto", "score_threshold": 0.3},
    }
    request, response = await call_with_search(tools=[tool])
    retrieval = request.retrieval
    assert retrieval is not None
    assert (retrieval.collection, retrieval.query, retrieval.k, retrieval.min_score) == (
        *("handbook", "where?", 4, 0.3),
    )
    expression = {"$and": [{"site": {"$eq": "harbour"}}, {"year": {"$gt": 2020}}]}
    assert json.loads(retrieval.filter) == expression
    assert response["tools"] == [tool]


async def test_response_cites_passages_of_file_search() -> None:
    """It cites each document once, and lists the passages only on request."""
    _, response = await call_with_search(include=[RESULTS])
    search, message = response["output"]
    assert (search["type"], search["status"]) == ("file_search_call", "completed")
    assert search["queries"] == ["where?"]
    results = [
        (result["file_id"], result["filename"], result["score"]) for result in search["results"]
    ]
    assert results == [("ferry", "Ferries", 0.9), ("ferry", "Ferries", 0.5), ("map", "map.md", 0.4)]
    assert search["results"][0]["text"] == PASSAGES[0].text
    end = len("".join(TEXTS))
    assert message["content"][0]["annotations"] == [
        {"type": "file_citation", "file_id": "ferry", "filename": "Ferries", "index": end},
        {"type": "file_citation", "file_id": "map", "filename": "map.md", "index": end},
    ]
    assert response["usage"]["input_tokens_details"]["retrieved_tokens"] == 9
    _, response = await call_with_search()
    assert response["output"][0]["results"] is None


async def test_model_name_with_collection_adds_file_search() -> None:
    request, response = await call_with_search(model=f"{MODEL}@handbook", tools=[])
    assert request.retrieval is not None and request.retrieval.collection == "handbook"
    assert [item["type"] for item in response["output"]] == ["file_search_call", "message"]


async def test_tool_choice_none_disables_file_search() -> None:
    request, response = await call_with_search(tool_choice="none")
    assert request.retrieval is None
    assert [item["type"] for item in response["output"]] == ["message"]
    request, _ = await call_with_search(tool_choice={"type": "file_search"})
    assert request.retrieval is not None


async def test_file_search_stream_resumes_after_any_event() -> None:
    """A second gateway derives the same event numbers from the log."""
    gateway = answering()
    search_body = body(stream=True, tools=[TOOL], include=[RESULTS])
    async with gateway.client() as client:
        events = checked((await client.post(PATH, json=search_body)).text)
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
    second_gateway = beside(gateway)
    for i, event in enumerate(events):
        query = f"stream=true&starting_after={event['sequence_number']}"
        async with second_gateway.client() as client:
            rest = checked((await client.get(f"{PATH}/{whole['id']}?{query}")).text)
        assert spelled([*events[: i + 1], *rest]) == "".join(TEXTS)
        assert [e for e in rest if "delta" not in e] == [
            e for e in events[i + 1 :] if "delta" not in e
        ]


async def test_failed_file_search_lets_answer_continue() -> None:
    gateway = InProcessGateway()

    def answer(request: Request) -> None:
        name = request.request_id
        error = WireError(code="deadline_exceeded", message="late", retriable=True)
        failure = StreamRetrieved(request_id=name, collection="handbook", error=error)
        token_frame = frame(name, TEXTS, end=stream_end(name, TEXTS))
        gateway.log.hub.apply(replace(token_frame, retrieved=[failure]), 0)

    gateway.log.on_request = answer
    status, response = await call(gateway, body(tools=[TOOL]), PATH)
    assert (status, response["status"], response["output"][0]["status"]) == (
        200,
        "completed",
        "failed",
    )
    assert response["output"][1]["content"][0]["annotations"] == []
    await until(lambda: not gateway.state.calls.in_flight)


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


@pytest.mark.parametrize("wrong", WRONG, ids=lambda argument: str(argument)[:40])
async def test_file_search_rejects_invalid_filters(wrong: Any) -> None:
    gateway = answering()
    status, response = await call(gateway, body(tools=[TOOL | {"filters": wrong}]), PATH)
    assert status == 400 and response["error"]["param"] == "tools.0.filters", response
    assert not gateway.log.sent_records


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
async def test_file_search_rejects_invalid_options(tool: dict[str, Any], message: str) -> None:
    gateway = answering()
    status, response = await call(gateway, body(tools=[TOOL | tool]), PATH)
    assert status == 400 and message in response["error"]["message"], response
    assert not gateway.log.sent_records
