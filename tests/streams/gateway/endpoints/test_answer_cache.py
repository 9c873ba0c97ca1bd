"""Answers that are kept for whoever asks the same again: over HTTP, and by the `openai` package."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from schemas.errors import NotReady, UnknownCollection
from schemas.records import Citation, Request, StreamRetrieved, WireError
from streams.gateway.cache.query import CHANGES_NO_TEXT, CHECKED
from streams.gateway.request.body import ChatBody
from tests.streams.gateway.in_process import InProcessGateway, call, serving
from tests.streams.gateway.samples import MODEL, chat, completion, ended, events_of, frame, text_of
from tests.waiting import PATIENCE_S, until

Json = dict[str, Any]
FERRY = "When does the ferry head for a bad dock?"
GREEDY: Json = {"temperature": 0, "cache": True}
DOCK = Citation(
    passage_id="dock#0", document_id="dock", title="Docks", source="dock.md", text="At 7.",
    score=0.5, content="first",
)  # fmt: skip


def asked(question: str = FERRY, **fields: Any) -> Json:
    return chat(question, **{**GREEDY, **fields})


def looked_up(question: str = FERRY, **fields: Any) -> Json:
    return asked(question, retrieval={"collection": "town"}, **fields)


def answering(
    gateway: InProcessGateway, *texts: str, cites: tuple[Citation, ...] = (DOCK,), **told: Any
) -> None:
    """Answer every request, with what was found where something was to be."""
    end_fields = told.pop("end", {})
    for each in cites:
        gateway.pool.contents[each.document_id] = each.content

    def answer(request: Request) -> None:
        end = ended(request.request_id, texts, **end_fields)
        first = frame(request.request_id, list(texts), end=end)
        if request.retrieval is not None:
            found = StreamRetrieved(
                request_id=request.request_id, collection="town", citations=cites, tokens=9, **told
            )
            first = replace(first, retrieved=[found])
        gateway.log.hub.apply(first, asyncio.get_running_loop().time())

    gateway.log.on_request = answer


def gateway_of(
    *texts: str, pool_of: InProcessGateway | None = None, **settings: Any
) -> InProcessGateway:
    """One that answers so; perhaps one more of the same pool."""
    gateway = InProcessGateway(cache_wait_ms=10_000, **settings)
    if pool_of is not None:
        gateway.pool = pool_of.pool
        gateway.state.pool = gateway.state.answers._pool = pool_of.pool
    answering(gateway, *(texts or ("At ", "7")))
    return gateway


async def kept(gateway: InProcessGateway, body: Json, **headers: str) -> Json:
    """Ask, and wait until the answer is kept."""
    answer = await asks(gateway, body, **headers)
    await until(lambda: not gateway.state._background)
    return answer


async def asks(gateway: InProcessGateway, body: Json, **headers: str) -> Json:
    status, answer = await call(gateway, body, **headers)
    assert status == 200, answer
    found: Json = answer
    return found


def is_hit(answer: Json) -> bool:
    return "cache" in answer["trivium"]


async def test_the_same_question_gets_the_same_answer_without_a_router() -> None:
    gateway = gateway_of()
    first = await kept(gateway, looked_up())
    assert not is_hit(first)
    other = gateway_of("other", pool_of=gateway)
    second = await asks(other, looked_up("please: when does the FERRY head for a bad dock"))
    assert other.log.requests == []
    assert second["choices"] == first["choices"]
    assert second["usage"] == first["usage"] and second.keys() == first.keys()
    assert second["id"] != first["id"]
    told = second["trivium"]
    assert told["retrieval"] == first["trivium"]["retrieval"]
    assert told["cache"]["similarity"] == pytest.approx(1, abs=0.2)
    assert (told["cache"]["age_s"] >= 0, told["cache"]["id"][:11]) == (True, "answer-all-")


async def test_a_stream_gets_it_as_events() -> None:
    gateway = gateway_of()
    body = looked_up(stream=True, stream_options={"include_usage": True})
    async with gateway.client() as client:
        first = await client.post("/v1/chat/completions", json=body)
        await until(lambda: bool(gateway.pool.documents))
        second = await client.post("/v1/chat/completions", json=body)
    one, two = events_of(first.text), events_of(second.text)
    assert second.headers["content-type"] == first.headers["content-type"]
    assert len(gateway.log.requests) == 1
    assert text_of(one) == text_of(two) == "At 7"
    assert one[-2]["usage"] == two[-2]["usage"]
    assert len(two) == 4 + len(["[DONE]"])
    last = [next(e for e in es if e["choices"] and e["choices"][0]["finish_reason"])
            for es in (one, two)]  # fmt: skip
    assert last[0]["choices"] == last[1]["choices"]
    assert is_hit(last[1]) and not is_hit(last[0])
    assert "id: " not in second.text and two[-1] == "[DONE]"


async def test_the_openai_package_gets_both_forms() -> None:
    gateway = gateway_of(api_keys=("key",))
    async with serving(gateway) as url:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="key", timeout=PATIENCE_S
        ) as client:

            async def ask() -> Any:
                return await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": FERRY}],
                    temperature=0,
                    extra_body={"cache": True, "retrieval": {"collection": "town"}},
                )

            first = await ask()
            await until(lambda: bool(gateway.pool.documents))
            second = await ask()
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": FERRY}],
                temperature=0,
                stream=True,
                extra_body={"cache": True, "retrieval": {"collection": "town"}},
            )
            chunks = [chunk async for chunk in stream]
    assert second.choices == first.choices and second.usage == first.usage
    assert second.trivium["cache"]["id"] and len(gateway.log.requests) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "At 7"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_tenants_have_each_their_own() -> None:
    gateway = gateway_of(api_keys=("mine", "yours"))
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    await kept(gateway, looked_up(), **mine)
    assert not is_hit(await kept(gateway, looked_up(), **yours))
    again = await asks(gateway, looked_up(), **mine)
    assert is_hit(again) and len(gateway.pool.documents) == 2
    assert len({each.tenant for each in gateway.pool.documents.values()}) == 2
    entry_id = again["trivium"]["cache"]["id"]
    async with gateway.client() as client:
        path = f"/v1/cache/{entry_id}"
        assert (await client.delete(path, headers=yours)).status_code == 404
        assert (await client.delete(path)).status_code == 401
        assert is_hit(await asks(gateway, looked_up(), **mine))
        assert (await client.delete(path, headers=mine)).json()["deleted"] is True
        assert (await client.delete("/v1/cache/answer-x", headers=mine)).status_code == 404
    assert not is_hit(await asks(gateway, looked_up(), **mine))


async def test_a_changed_document_takes_its_answers_with_it() -> None:
    gateway = gateway_of()
    await kept(gateway, looked_up())
    gateway.pool.contents["dock"] = "second"
    answering(gateway, "At ", "8", cites=(replace(DOCK, content="second"),))
    assert not is_hit(await kept(gateway, looked_up()))
    again = await asks(gateway, looked_up())
    assert is_hit(again) and again["choices"][0]["message"]["content"] == "At 8"
    assert gateway.pool.checked[-1] == ("town", "")


async def test_an_answer_is_forgotten_in_time() -> None:
    gateway = gateway_of()
    await kept(gateway, asked(cache={"ttl_s": 60}))
    assert is_hit(await asks(gateway, asked()))
    ((name, document),) = gateway.pool.documents.items()
    past = json.loads(document.metadata) | {"until_ms": 1}
    gateway.pool.documents[name] = replace(document, metadata=json.dumps(past))
    assert not is_hit(await asks(gateway, asked()))


@pytest.mark.parametrize(
    "other",
    [
        chat(FERRY, **GREEDY, max_tokens=9),
        chat(FERRY, **GREEDY, stop="x"),
        chat(FERRY, **GREEDY, retrieval={"collection": "other"}),
        chat(FERRY, **GREEDY, retrieval={"collection": "town", "k": 2}),
        chat(FERRY, **GREEDY, retrieval={"collection": "town", "filter": {"a": 1}}),
        chat(FERRY, **GREEDY, retrieval={"collection": "town", "probes": True}),
        chat(FERRY, **GREEDY, chat_template_kwargs={"x": 1}),
        chat(FERRY, **GREEDY),
        looked_up("When does the ferry head for no bad dock?"),
        {
            **looked_up(),
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": FERRY},
            ],
        },
    ],
)
async def test_whatever_makes_another_answer_makes_another_entry(other: Json) -> None:
    gateway = gateway_of(max_model_len=4_000)
    await kept(gateway, looked_up(seed=1))
    assert is_hit(await asks(gateway, looked_up(seed=2, user="somebody else")))
    assert not is_hit(await asks(gateway, other))


async def test_a_prompt_that_may_be_cut_has_answers_of_its_own() -> None:
    """Nobody gets the answer to another prompt."""
    gateway = gateway_of()
    cut = asked(f"Please, {FERRY}", truncate_prompt_tokens=3)
    await kept(gateway, cut)
    assert is_hit(await asks(gateway, cut))
    others: list[Json] = [{}, {"truncate_prompt_tokens": 4}, {**cut, "truncation_side": "right"}]
    for other in (*(asked(f"Please, {FERRY}", **each) for each in others[:2]), others[2]):
        assert not is_hit(await asks(gateway, other))
    assert not is_hit(await asks(gateway, asked(truncate_prompt_tokens=3)))


def test_a_new_field_of_a_chat_is_in_the_key_of_its_answer() -> None:
    """Unless it is listed as one that changes no text, or that the key has as it was checked."""
    assert not CHANGES_NO_TEXT & CHECKED
    others = set(ChatBody.model_fields) - CHANGES_NO_TEXT - CHECKED
    assert CHANGES_NO_TEXT | CHECKED <= set(ChatBody.model_fields)
    assert others == {"truncate_prompt_tokens", "truncation_side", "cache_salt"}, (
        "a field that is new here: is it one that changes no text? else add it to this test"
    )


async def test_a_conversations_next_turn_is_kept_under_all_that_was_said() -> None:
    gateway = gateway_of()

    def turn(answer: str, **fields: Any) -> Json:
        earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        return {**asked(**fields), "messages": [*earlier, {"role": "user", "content": FERRY}]}

    await kept(gateway, turn("b"))
    assert is_hit(await asks(gateway, turn("b")))
    assert not is_hit(await asks(gateway, turn("c")))
    looked = {"retrieval": {"collection": "town"}}  # passages of its first turn stand in it, too
    await kept(gateway, turn("b", **looked))
    assert not is_hit(await asks(gateway, turn("b", **looked)))


LATE = WireError(code="deadline_exceeded", message="too late", retriable=True)


@pytest.mark.parametrize(
    "told",
    [
        {"end": {"finish_reason": "length"}},
        {"missing_shards": 1},
        {"degraded": "no embedding worker is ready"},
        {"error": LATE},
        {"cites": ()},
        {"cites": (replace(DOCK, content=""),)},
        {"cites": (DOCK, replace(DOCK, passage_id="dock#1", content="second"))},
    ],
)
async def test_an_answer_that_is_none_for_others_is_not_kept(told: Json) -> None:
    gateway = gateway_of()
    answering(gateway, "At ", "7", **told)
    await kept(gateway, looked_up())
    assert not gateway.pool.documents


async def test_a_large_answer_is_not_kept() -> None:
    gateway = gateway_of("x" * 70_000)
    await kept(gateway, asked())
    assert not gateway.pool.documents


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.5}, "cache: needs temperature 0"),
        ({"temperature": None}, "cache: needs temperature 0"),
        ({"n": 2}, "cache: needs n=1"),
        ({"logprobs": True}, "cache: keeps neither log-probabilities nor token ids"),
        ({"return_token_ids": True}, "cache: keeps neither"),
        ({"cache": {"threshold": 1.5}}, "cache.threshold: expected less than or equal to 1"),
        ({"cache": {"ttl_s": 0}}, "cache.ttl_s: expected greater than or equal to 1"),
        ({"cache": {"max": 1}}, "cache.max: unknown field"),
        ({"cache": "yes"}, "cache: expected"),
    ],
)
async def test_what_cannot_be_kept_is_refused(fields: Json, message: str) -> None:
    status, answer = await call(gateway_of(), asked(**fields))
    assert (status, message in answer["error"]["message"]) == (400, True), answer


async def test_completions_are_not_kept() -> None:
    status, answer = await call(gateway_of(), completion("x", cache=True), "/v1/completions")
    assert (status, answer["error"]["param"]) == (400, "cache")


async def test_settings_have_answers_kept_though_nobody_asks() -> None:
    by_alias = {**chat(FERRY, temperature=0), "model": f"{MODEL}@town"}
    gateway = gateway_of(cache_for=("town",))
    await kept(gateway, by_alias)
    assert is_hit(await asks(gateway, by_alias))
    assert not is_hit(await asks(gateway, {**by_alias, "cache": False}))
    assert not is_hit(await kept(gateway, {**by_alias, "temperature": 0.7}))
    assert not is_hit(await kept(gateway, chat(FERRY, temperature=0)))
    assert len(gateway.pool.documents) == 1
    everything = gateway_of(cache_for=("*",))
    await kept(everything, chat(FERRY, temperature=0))
    assert is_hit(await asks(everything, chat(FERRY, temperature=0)))


async def test_nothing_is_kept_where_nobody_wishes_it() -> None:
    gateway = gateway_of(max_model_len=4_000)
    await kept(gateway, chat(FERRY, temperature=0))
    await kept(gateway, asked("x" * 1_001))
    assert not gateway.pool.documents


async def test_without_a_pool_an_answer_is_made() -> None:
    gateway = gateway_of()
    gateway.pool.trouble = NotReady("no embedding worker is ready")
    assert not is_hit(await kept(gateway, asked()))
    assert 'cache_lookups_total{outcome="failed"} 1.0' in gateway.state.metrics.render().decode()


async def test_before_anything_was_kept_nothing_fails() -> None:
    gateway = gateway_of()
    gateway.pool.trouble = UnknownCollection("no collection 'answers'")
    await kept(gateway, asked())
    assert 'cache_lookups_total{outcome="miss"} 1.0' in gateway.state.metrics.render().decode()


async def test_an_error_of_ours_fails_no_chat(caplog: pytest.LogCaptureFixture) -> None:
    gateway = gateway_of()
    broken: Any = RuntimeError("ours")
    gateway.pool.trouble = broken
    assert not is_hit(await kept(gateway, asked()))
    assert "no answer was looked up" in caplog.text and not gateway.pool.documents


async def test_a_lookup_that_takes_too_long_is_a_miss() -> None:
    gateway = gateway_of()
    await kept(gateway, asked())
    slow = InProcessGateway(cache_wait_ms=1)
    slow.pool = slow.state.answers._pool = gateway.pool
    answering(slow, "At ", "7")
    gateway.pool.delay = asyncio.Event()
    assert not is_hit(await kept(slow, asked()))
    assert len(slow.log.requests) == 1
    gateway.pool.delay.set()
    assert is_hit(await asks(gateway, asked()))


async def test_a_tenant_has_so_many_entries_at_most() -> None:
    gateway = gateway_of(cache_entries_max=3)
    for number in range(12):
        await kept(gateway, asked(f"{FERRY} {number}"))
    assert 1 < len(gateway.pool.documents) <= 3


async def test_the_next_turn_after_a_kept_answer_finds_its_conversation() -> None:
    gateway = gateway_of()
    await kept(gateway, asked())
    async with gateway.client() as client:
        hit = await client.post("/v1/chat/completions", json=asked())
        said = {"role": "assistant", "content": "At 7"}
        messages = [*asked()["messages"], said, {"role": "user", "content": "b"}]
        body = {**chat(), "messages": messages}
        after = await client.post("/v1/chat/completions", json=body)
    assert after.headers["x-session-id"] == hit.headers["x-session-id"]


async def test_what_nobody_here_has_written_is_not_served() -> None:
    gateway = gateway_of()
    await kept(gateway, asked())
    ((name, document),) = gateway.pool.documents.items()
    for text in ("", "[]", '{"text": "x"}', document.text.replace("When", "Where")):
        gateway.pool.documents[name] = replace(document, text=text)
        assert not is_hit(await asks(gateway, asked()))
