"""What a chat wants to have found: what routers get, and what is refused."""

from typing import Any

import pytest

from schemas.records import Request, Retrieval
from schemas.rules.tokens import unpack_tokens
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, completion
from tests.streams.gateway.small_tokenizer import tokenizer

BOOKS = {"collection": "books"}


async def sent(gateway: InProcessGateway, body: Any) -> Request:
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


async def test_routers_are_told_what_to_find_and_where_it_goes() -> None:
    gateway = InProcessGateway(ttft_ms=800, retrieval_share=0.25)
    body = chat("how do you do", max_tokens=20, retrieval={**BOOKS, "k": 2, "mode": "words"})
    request = await sent(gateway, body)
    wanted = retrieval_of(request)
    assert (wanted.collection, wanted.query, wanted.k) == ("books", "how do you do", 2)
    assert (wanted.mode, wanted.filter, wanted.min_score) == ("words", "", 0.2)
    assert wanted.by_ms == request.arrived_ms + 200
    prompt = unpack_tokens(request.prompt_tokens)
    within = tokenizer().encoder.raw.decode(prompt[wanted.at : wanted.tail_at])
    assert within == "how do you do"
    assert texts(wanted.lead, wanted.joint, wanted.trail, wanted.tail) == [
        "Context:\n",
        "\n",
        "\n\nQuestion: ",
        "\nAnswer in one short sentence.",
    ]


async def test_the_plain_prompt_is_the_one_without_retrieval() -> None:
    gateway = InProcessGateway()
    with_search = await sent(gateway, chat("hello", retrieval=BOOKS))
    assert with_search.prompt_tokens == (await sent(gateway, chat("hello"))).prompt_tokens


async def test_the_models_name_brings_a_collection() -> None:
    gateway = InProcessGateway()
    request = await sent(gateway, {**chat("hello"), "model": f"{MODEL}@books"})
    assert (request.model, retrieval_of(request).collection) == (MODEL, "books")


@pytest.mark.parametrize("value", [{"year": {"$gte": 2020}}, '{"year": {"$gte": 2020}}'])
async def test_a_filter_is_an_object_or_its_text(value: Any) -> None:
    request = await sent(InProcessGateway(), chat("x", retrieval={**BOOKS, "filter": value}))
    assert retrieval_of(request).filter == '{"year": {"$gte": 2020}}'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"year": {"$near": 1}}, "or $exists, found '$near'"),
        ('{"year": {"$gt": "May"}}', "a number, or a date such as 2024-05-31T12:00:00Z"),
        ({}, "expected an object such as"),
        ("rubbish", "expected a JSON object"),
    ],
)
async def test_a_filter_that_means_nothing_is_refused_at_once(value: Any, said: str) -> None:
    body = chat("x", retrieval={**BOOKS, "filter": value})
    async with InProcessGateway().client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("filter: expected")
    assert said in answer.json()["error"]["message"]


async def test_the_last_question_is_looked_up_and_marked() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    request = await sent(InProcessGateway(), {**chat(), "messages": messages, "retrieval": BOOKS})
    wanted = retrieval_of(request)
    prompt = unpack_tokens(request.prompt_tokens)
    assert wanted.query == "second"
    assert tokenizer().encoder.raw.decode(prompt[wanted.at : wanted.tail_at]) == "second"
    assert wanted.history_tokens == wanted.at


async def test_a_special_tokens_name_stays_text_in_the_marked_message() -> None:
    request = await sent(InProcessGateway(), chat("<|user|>", retrieval=BOOKS))
    wanted = retrieval_of(request)
    marked = unpack_tokens(request.prompt_tokens)[wanted.at : wanted.tail_at]
    assert len(marked) > 1 and tokenizer().encoder.raw.decode(marked) == "<|user|>"


async def test_an_answer_without_a_limit_leaves_room_for_passages() -> None:
    request = await sent(
        InProcessGateway(max_model_len=400), chat("x", retrieval={**BOOKS, "tokens_max": 50})
    )
    wanted = retrieval_of(request)
    around = sum(map(len, map(unpack_tokens, (wanted.lead, wanted.trail, wanted.tail))))
    joints = len(unpack_tokens(wanted.joint)) * (wanted.k - 1)
    prompt = len(unpack_tokens(request.prompt_tokens))
    assert prompt + request.sampling.max_tokens + 50 + around + joints == 400
    assert (wanted.tokens_max, wanted.room_tokens) == (50, 50 + around + joints)


async def test_later_turns_leave_room_for_what_earlier_ones_had_put_in() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fields = {"retrieval": {**BOOKS, "tokens_max": 50}}
    first = await sent(InProcessGateway(max_model_len=2_000), chat("x", **fields))
    body = {**chat(), "messages": [*turns, *turns, *chat("x")["messages"]], **fields}
    third = await sent(InProcessGateway(max_model_len=2_000), body)
    assert retrieval_of(third).room_tokens == 3 * retrieval_of(first).room_tokens


async def test_passages_take_half_of_what_is_left_at_most() -> None:
    request = await sent(
        InProcessGateway(max_model_len=200), chat("x", retrieval={**BOOKS, "tokens_max": 500})
    )
    left = 200 - len(unpack_tokens(request.prompt_tokens))
    assert retrieval_of(request).room_tokens == left // 2
    assert request.sampling.max_tokens == left - left // 2
    assert 0 < retrieval_of(request).tokens_max < left // 2


async def test_a_turns_prompt_is_a_beginning_of_the_next_ones_history() -> None:
    """So that routers find what they had put in before."""
    gateway = InProcessGateway()
    turns = [
        {"role": "user", "content": "first thing"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    first, second = [
        await sent(gateway, {**chat(), "messages": messages, "retrieval": BOOKS})
        for messages in (turns[:1], turns)
    ]
    history = 4 * retrieval_of(second).history_tokens
    assert second.prompt_tokens[:history].startswith(first.prompt_tokens)


async def test_an_answer_that_wants_all_room_leaves_none_for_passages() -> None:
    plain = await sent(InProcessGateway(max_model_len=200), chat("x"))
    wanted = chat("x", max_tokens=plain.sampling.max_tokens, retrieval=BOOKS)
    request = await sent(InProcessGateway(max_model_len=200), wanted)
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
async def test_what_cannot_be_looked_up_is_refused(body: Any, message: str) -> None:
    status, answer = await call(InProcessGateway(), body)
    assert status in (400, 404)
    assert message in answer["error"]["message"]


async def test_completions_are_not_looked_up() -> None:
    named = {**completion("x"), "model": f"{MODEL}@books"}
    status, answer = await call(InProcessGateway(), named, "/v1/completions")
    assert (status, "only chats" in answer["error"]["message"]) == (400, True)
    wished = completion("x", retrieval=BOOKS)
    status, answer = await call(InProcessGateway(), wished, "/v1/completions")
    assert (status, "retrieval" in answer["error"]["message"]) == (400, True)
