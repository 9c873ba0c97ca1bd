"""What a chat wants to have found: what routers get, and what is refused."""

from typing import Any

import pytest

from schemas.records import Request, Retrieval
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, completion
from tests.streams.gateway.small_tokenizer import tokenizer

BOOKS = {"collection": "books"}


async def send_chat(gateway: InProcessGateway, body: Any) -> Request:
    """The request that a chat becomes."""
    gateway.answer_with("a")
    status, answer = await call(gateway, body)
    assert status == 200, answer
    return gateway.log.requests[-1]


def retrieval_of(request: Request) -> Retrieval:
    assert request.retrieval is not None
    return request.retrieval


def texts(*parts: bytes) -> list[str]:
    raw = tokenizer().encoder.raw
    return [raw.decode(unpack_tokens(part), skip_special_tokens=False) for part in parts]


async def test_request_record_tells_router_query_and_insert_position() -> None:
    gateway = InProcessGateway(ttft_ms=400)
    body = chat("how do you do", max_tokens=20, retrieval={**BOOKS, "k": 2, "mode": "words"})
    request = await send_chat(gateway, body)
    retrieval = retrieval_of(request)
    assert (retrieval.collection, retrieval.query, retrieval.k) == ("books", "how do you do", 2)
    assert (retrieval.mode, retrieval.filter, retrieval.min_score) == ("words", "", 0.2)
    assert retrieval.by_ms == request.arrived_ms + 200
    prompt = unpack_tokens(request.prompt_tokens)
    within = tokenizer().encoder.raw.decode(prompt[retrieval.at : retrieval.tail_at])
    assert within == "how do you do"
    assert texts(retrieval.lead, retrieval.joint, retrieval.trail, retrieval.tail) == [
        "Context:\n",
        "\n",
        "\n\nQuestion: ",
        "\nAnswer in one short sentence.",
    ]


async def test_search_leaves_prompt_tokens_unchanged() -> None:
    gateway = InProcessGateway()
    with_search = await send_chat(gateway, chat("hello", retrieval=BOOKS))
    assert with_search.prompt_tokens == (await send_chat(gateway, chat("hello"))).prompt_tokens


async def test_model_name_selects_collection() -> None:
    gateway = InProcessGateway()
    request = await send_chat(gateway, {**chat("hello"), "model": f"{MODEL}@books"})
    assert (request.model, retrieval_of(request).collection) == (MODEL, "books")


@pytest.mark.parametrize("value", [{"year": {"$gte": 2020}}, '{"year": {"$gte": 2020}}'])
async def test_search_accepts_filter_as_object_or_json_text(value: Any) -> None:
    request = await send_chat(InProcessGateway(), chat("x", retrieval={**BOOKS, "filter": value}))
    assert retrieval_of(request).filter == '{"year": {"$gte": 2020}}'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"year": {"$near": 1}}, "or $exists, found '$near'"),
        ('{"year": {"$gt": "May"}}', "a number, or a date such as 2024-05-31T12:00:00Z"),
        ({}, "expected an object such as"),
        ("rubbish", "expected a JSON object"),
    ],
)
async def test_search_rejects_invalid_filter(value: Any, message: str) -> None:
    body = chat("x", retrieval={**BOOKS, "filter": value})
    async with InProcessGateway().client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("filter: expected")
    assert message in answer.json()["error"]["message"]


async def test_search_queries_and_marks_last_question() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    request = await send_chat(
        InProcessGateway(), {**chat(), "messages": messages, "retrieval": BOOKS}
    )
    retrieval = retrieval_of(request)
    prompt = unpack_tokens(request.prompt_tokens)
    assert retrieval.query == "second"
    assert tokenizer().encoder.raw.decode(prompt[retrieval.at : retrieval.tail_at]) == "second"
    assert retrieval.history_tokens == retrieval.at


async def test_search_keeps_special_token_in_question_as_text() -> None:
    request = await send_chat(InProcessGateway(), chat("<|user|>", retrieval=BOOKS))
    retrieval = retrieval_of(request)
    marked = unpack_tokens(request.prompt_tokens)[retrieval.at : retrieval.tail_at]
    assert len(marked) > 1 and tokenizer().encoder.raw.decode(marked) == "<|user|>"


@pytest.mark.parametrize("max_tokens", [None, 400])
async def test_default_max_tokens_leaves_room_for_passages(max_tokens: int | None) -> None:
    """So does a number that is more than fits."""
    body = chat("x", retrieval={**BOOKS, "tokens_max": 50}, max_tokens=max_tokens)
    request = await send_chat(InProcessGateway(max_model_len=400), body)
    retrieval = retrieval_of(request)
    around = sum(map(len, map(unpack_tokens, (retrieval.lead, retrieval.trail, retrieval.tail))))
    joints = len(unpack_tokens(retrieval.joint)) * (retrieval.k - 1)
    prompt = len(unpack_tokens(request.prompt_tokens))
    assert prompt + request.sampling.max_tokens + 50 + around + joints == 400
    assert (retrieval.tokens_max, retrieval.room_tokens) == (50, 50 + around + joints)


async def test_later_turns_leave_room_for_passages_of_earlier_ones() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fields = {"retrieval": {**BOOKS, "tokens_max": 50}}
    first = await send_chat(InProcessGateway(max_model_len=2_000), chat("x", **fields))
    body = {**chat(), "messages": [*turns, *turns, *chat("x")["messages"]], **fields}
    third = await send_chat(InProcessGateway(max_model_len=2_000), body)
    assert retrieval_of(third).room_tokens == 3 * retrieval_of(first).room_tokens


async def test_passages_take_at_most_half_of_free_context() -> None:
    request = await send_chat(
        InProcessGateway(max_model_len=200), chat("x", retrieval={**BOOKS, "tokens_max": 500})
    )
    free_tokens = 200 - len(unpack_tokens(request.prompt_tokens))
    assert retrieval_of(request).room_tokens == free_tokens // 2
    assert request.sampling.max_tokens == free_tokens - free_tokens // 2
    assert 0 < retrieval_of(request).tokens_max < free_tokens // 2


async def test_prompt_of_turn_is_prefix_of_next_history() -> None:
    """Routers can thereby find the passages that they inserted before."""
    gateway = InProcessGateway()
    turns = [
        {"role": "user", "content": "first thing"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    first, second = [
        await send_chat(gateway, {**chat(), "messages": messages, "retrieval": BOOKS})
        for messages in (turns[:1], turns)
    ]
    history = 4 * retrieval_of(second).history_tokens
    assert second.prompt_tokens[:history].startswith(first.prompt_tokens)


async def test_search_leaves_no_room_when_answer_takes_whole_context() -> None:
    plain = await send_chat(InProcessGateway(max_model_len=200), chat("x"))
    body = chat("x", max_tokens=plain.sampling.max_tokens, retrieval=BOOKS)
    request = await send_chat(InProcessGateway(max_model_len=200), body)
    assert retrieval_of(request).tokens_max == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat("x", retrieval={}), "retrieval.collection: required"),
        (chat("x", retrieval={"collection": ""}), "retrieval.collection: expected at least 1"),
        (chat("x", retrieval={**BOOKS, "k": 0}), "retrieval.k: expected greater than"),
        (chat("x", retrieval={**BOOKS, "k": 65}), "retrieval.k: expected less than"),
        (chat("x", retrieval={**BOOKS, "mode": "x"}), "retrieval.mode: expected 'vector'"),
        (chat("x", retrieval={**BOOKS, "top": 1}), "retrieval.top: unknown field"),
        (chat("x", retrieval={**BOOKS, "query": " "}), "retrieval.query: expected a text"),
        (chat(" ", retrieval=BOOKS), "retrieval.query: expected a text"),
        (
            {**chat("x", retrieval=BOOKS), "model": f"{MODEL}@films"},
            "retrieval.collection: the model names 'films', found 'books'",
        ),
        (
            {**chat(), "messages": [{"role": "system", "content": "x"}], "retrieval": BOOKS},
            "retrieval: needs a user message",
        ),
        ({**chat("x"), "model": f"{MODEL}@"}, f"model: expected '{MODEL}', found '{MODEL}@'"),
    ],
)
async def test_search_rejects_invalid_options(body: Any, message: str) -> None:
    status, answer = await call(InProcessGateway(), body)
    assert status in (400, 404)
    assert message in answer["error"]["message"]


async def test_search_rejects_completions() -> None:
    by_model_name = {**completion("x"), "model": f"{MODEL}@books"}
    status, answer = await call(InProcessGateway(), by_model_name, "/v1/completions")
    assert (status, "only chats" in answer["error"]["message"]) == (400, True)
    by_field = completion("x", retrieval=BOOKS)
    status, answer = await call(InProcessGateway(), by_field, "/v1/completions")
    assert (status, "retrieval" in answer["error"]["message"]) == (400, True)
