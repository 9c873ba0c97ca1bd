"""Answers that are kept for whoever asks the same again: over HTTP, and by the `openai` package."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from schemas.errors import NotReady, UnknownCollection
from schemas.records import Citation, Request, StreamRetrieved, WireError
from streams.calls.request.body import ChatBody
from streams.openai.cache.query import CHANGES_NO_TEXT, CHECKED
from tests.streams.gateway.in_process import InProcessGateway, call, serving
from tests.streams.gateway.samples import (
    MODEL,
    chat,
    completion,
    events_of,
    frame,
    stream_end,
    text_of,
)
from tests.waits import PATIENCE_S, until

Json = dict[str, Any]
FERRY = "When does the ferry head for a bad dock?"
GREEDY: Json = {"temperature": 0, "cache": True}
DOCK = Citation(
    passage_id="dock#0", document_id="dock", title="Docks", source="dock.md", text="At 7.",
    score=0.5, content="first",
)  # fmt: skip


def cacheable_chat(question: str = FERRY, **fields: Any) -> Json:
    return chat(question, **{**GREEDY, **fields})


def cacheable_search(question: str = FERRY, **fields: Any) -> Json:
    return cacheable_chat(question, retrieval={"collection": "town"}, **fields)


def answering(
    gateway: InProcessGateway, *texts: str, cites: tuple[Citation, ...] = (DOCK,), **fields: Any
) -> None:
    """Answer every request, with what was found where something was to be."""
    end_fields = fields.pop("end", {})
    for citation in cites:
        gateway.pool.contents[citation.document_id] = citation.content

    def answer(request: Request) -> None:
        end = stream_end(request.request_id, texts, **end_fields)
        first = frame(request.request_id, list(texts), end=end)
        if request.retrieval is not None:
            retrieved = StreamRetrieved(
                request_id=request.request_id,
                collection="town",
                citations=cites,
                tokens=9,
                **fields,
            )
            first = replace(first, retrieved=[retrieved])
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


async def ask_and_store(gateway: InProcessGateway, body: Json, **headers: str) -> Json:
    """Ask, and wait until the answer is kept."""
    answer = await ask(gateway, body, **headers)
    await until(lambda: not gateway.state.calls._background)
    return answer


async def ask(gateway: InProcessGateway, body: Json, **headers: str) -> Json:
    status, answer = await call(gateway, body, **headers)
    assert status == 200, answer
    result: Json = answer
    return result


def is_hit(answer: Json) -> bool:
    return "cache" in answer["trivium"]


async def test_answer_cache_answers_same_question_without_router() -> None:
    gateway = gateway_of()
    first = await ask_and_store(gateway, cacheable_search())
    assert not is_hit(first)
    second_gateway = gateway_of("other", pool_of=gateway)
    second = await ask(
        second_gateway, cacheable_search("please: when does the FERRY head for a bad dock")
    )
    assert second_gateway.log.requests == []
    assert second["choices"] == first["choices"]
    assert second["usage"] == first["usage"] and second.keys() == first.keys()
    assert second["id"] != first["id"]
    extension = second["trivium"]
    assert extension["retrieval"] == first["trivium"]["retrieval"]
    assert extension["cache"]["similarity"] == pytest.approx(1, abs=0.2)
    assert (extension["cache"]["age_s"] >= 0, extension["cache"]["id"][:11]) == (
        True,
        "answer-all-",
    )


async def test_answer_cache_streams_hit_as_events() -> None:
    gateway = gateway_of()
    body = cacheable_search(stream=True, stream_options={"include_usage": True})
    async with gateway.client() as client:
        first = await client.post("/v1/chat/completions", json=body)
        await until(lambda: bool(gateway.pool.documents))
        second = await client.post("/v1/chat/completions", json=body)
    first_events, second_events = events_of(first.text), events_of(second.text)
    assert second.headers["content-type"] == first.headers["content-type"]
    assert len(gateway.log.requests) == 1
    assert text_of(first_events) == text_of(second_events) == "At 7"
    assert first_events[-2]["usage"] == second_events[-2]["usage"]
    assert len(second_events) == 4 + len(["[DONE]"])
    last = [next(e for e in es if e["choices"] and e["choices"][0]["finish_reason"])
            for es in (first_events, second_events)]  # fmt: skip
    assert last[0]["choices"] == last[1]["choices"]
    assert is_hit(last[1]) and not is_hit(last[0])
    assert "id: " not in second.text and second_events[-1] == "[DONE]"


async def test_events_of_hit_have_usage_so_far() -> None:
    """`continuous_usage_stats` has the same effect as in a generated answer."""
    gateway = gateway_of()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = cacheable_search(stream=True, stream_options=options)
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=body)
        await until(lambda: bool(gateway.pool.documents))
        hit = await client.post("/v1/chat/completions", json=body)
    *events, last, end_mark = events_of(hit.text)
    assert end_mark == "[DONE]" and is_hit(last)
    whole = last["usage"]["completion_tokens"]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, whole, whole]
    assert {event["usage"]["prompt_tokens"] for event in [*events, last]} == {
        last["usage"]["prompt_tokens"]
    }


async def test_openai_client_reads_cached_answer_whole_and_streamed() -> None:
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


async def test_answer_cache_separates_tenants() -> None:
    gateway = gateway_of(api_keys=("mine", "yours"))
    first_key, second_key = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    await ask_and_store(gateway, cacheable_search(), **first_key)
    assert not is_hit(await ask_and_store(gateway, cacheable_search(), **second_key))
    repeat = await ask(gateway, cacheable_search(), **first_key)
    assert is_hit(repeat) and len(gateway.pool.documents) == 2
    assert len({document.tenant for document in gateway.pool.documents.values()}) == 2
    entry_id = repeat["trivium"]["cache"]["id"]
    async with gateway.client() as client:
        path = f"/v1/cache/{entry_id}"
        assert (await client.delete(path, headers=second_key)).status_code == 404
        assert (await client.delete(path)).status_code == 401
        assert is_hit(await ask(gateway, cacheable_search(), **first_key))
        assert (await client.delete(path, headers=first_key)).json()["deleted"] is True
        assert (await client.delete("/v1/cache/answer-x", headers=first_key)).status_code == 404
    assert not is_hit(await ask(gateway, cacheable_search(), **first_key))


async def test_answer_cache_drops_answers_of_changed_document() -> None:
    gateway = gateway_of()
    await ask_and_store(gateway, cacheable_search())
    gateway.pool.contents["dock"] = "second"
    answering(gateway, "At ", "8", cites=(replace(DOCK, content="second"),))
    assert not is_hit(await ask_and_store(gateway, cacheable_search()))
    repeat = await ask(gateway, cacheable_search())
    assert is_hit(repeat) and repeat["choices"][0]["message"]["content"] == "At 8"
    assert gateway.pool.checked[-1] == ("town", "")


async def test_answer_cache_expires_entries() -> None:
    gateway = gateway_of()
    await ask_and_store(gateway, cacheable_chat(cache={"ttl_s": 60}))
    assert is_hit(await ask(gateway, cacheable_chat()))
    ((name, document),) = gateway.pool.documents.items()
    expired_entry = json.loads(document.metadata) | {"until_ms": 1}
    gateway.pool.documents[name] = replace(document, metadata=json.dumps(expired_entry))
    assert not is_hit(await ask(gateway, cacheable_chat()))


@pytest.mark.parametrize(
    "changed_body",
    [
        chat(FERRY, **GREEDY, max_tokens=9),
        chat(FERRY, **GREEDY, stop="x"),
        chat(FERRY, **GREEDY, retrieval={"collection": "other"}),
        chat(FERRY, **GREEDY, retrieval={"collection": "town", "k": 2}),
        chat(FERRY, **GREEDY, retrieval={"collection": "town", "filter": {"a": 1}}),
        chat(FERRY, **GREEDY, retrieval={"collection": "town", "probes": True}),
        chat(FERRY, **GREEDY, chat_template_kwargs={"x": 1}),
        chat(FERRY, **GREEDY),
        cacheable_search("When does the ferry head for no bad dock?"),
        {
            **cacheable_search(),
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": FERRY},
            ],
        },
    ],
)
async def test_answer_cache_misses_when_request_differs(changed_body: Json) -> None:
    gateway = gateway_of(max_model_len=4_000)
    await ask_and_store(gateway, cacheable_search(seed=1))
    assert is_hit(await ask(gateway, cacheable_search(seed=2, user="somebody else")))
    assert not is_hit(await ask(gateway, changed_body))


async def test_answer_cache_separates_truncated_prompts() -> None:
    gateway = gateway_of()
    cut = cacheable_chat(f"Please, {FERRY}", truncate_prompt_tokens=3)
    await ask_and_store(gateway, cut)
    assert is_hit(await ask(gateway, cut))
    variants: list[Json] = [{}, {"truncate_prompt_tokens": 4}, {**cut, "truncation_side": "right"}]
    for variant in (
        *(cacheable_chat(f"Please, {FERRY}", **fields) for fields in variants[:2]),
        variants[2],
    ):
        assert not is_hit(await ask(gateway, variant))
    assert not is_hit(await ask(gateway, cacheable_chat(truncate_prompt_tokens=3)))


def test_answer_cache_key_covers_all_chat_fields() -> None:
    """Fields that change no text, or that the key has as checked, are listed."""
    assert not CHANGES_NO_TEXT & CHECKED
    fields_in_key = set(ChatBody.model_fields) - CHANGES_NO_TEXT - CHECKED
    assert CHANGES_NO_TEXT | CHECKED <= set(ChatBody.model_fields)
    assert fields_in_key == {"truncate_prompt_tokens", "truncation_side", "cache_salt"}, (
        "a field that is new here: is it one that changes no text? else add it to this test"
    )


async def test_answer_cache_key_covers_whole_conversation() -> None:
    gateway = gateway_of()

    def turn(answer: str, **fields: Any) -> Json:
        earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        return {
            **cacheable_chat(**fields),
            "messages": [*earlier, {"role": "user", "content": FERRY}],
        }

    await ask_and_store(gateway, turn("b"))
    assert is_hit(await ask(gateway, turn("b")))
    assert not is_hit(await ask(gateway, turn("c")))
    looked = {"retrieval": {"collection": "town"}}  # passages of its first turn stand in it, too
    await ask_and_store(gateway, turn("b", **looked))
    assert not is_hit(await ask(gateway, turn("b", **looked)))


LATE = WireError(code="deadline_exceeded", message="too late", retriable=True)


@pytest.mark.parametrize(
    "fields",
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
async def test_answer_cache_skips_incomplete_answers(fields: Json) -> None:
    gateway = gateway_of()
    answering(gateway, "At ", "7", **fields)
    await ask_and_store(gateway, cacheable_search())
    assert not gateway.pool.documents


async def test_answer_cache_skips_large_answers() -> None:
    gateway = gateway_of("x" * 70_000)
    await ask_and_store(gateway, cacheable_chat())
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
async def test_answer_cache_rejects_uncacheable_requests(fields: Json, message: str) -> None:
    status, answer = await call(gateway_of(), cacheable_chat(**fields))
    assert (status, message in answer["error"]["message"]) == (400, True), answer


async def test_answer_cache_rejects_completions() -> None:
    status, answer = await call(gateway_of(), completion("x", cache=True), "/v1/completions")
    assert (status, answer["error"]["param"]) == (400, "cache")


async def test_answer_cache_is_enabled_by_settings_for_collections() -> None:
    by_alias = {**chat(FERRY, temperature=0), "model": f"{MODEL}@town"}
    gateway = gateway_of(cache_for=("town",))
    await ask_and_store(gateway, by_alias)
    assert is_hit(await ask(gateway, by_alias))
    assert not is_hit(await ask(gateway, {**by_alias, "cache": False}))
    assert not is_hit(await ask_and_store(gateway, {**by_alias, "temperature": 0.7}))
    assert not is_hit(await ask_and_store(gateway, chat(FERRY, temperature=0)))
    assert len(gateway.pool.documents) == 1
    everything = gateway_of(cache_for=("*",))
    await ask_and_store(everything, chat(FERRY, temperature=0))
    assert is_hit(await ask(everything, chat(FERRY, temperature=0)))


async def test_answer_cache_stores_nothing_unless_requested() -> None:
    gateway = gateway_of(max_model_len=4_000)
    await ask_and_store(gateway, chat(FERRY, temperature=0))
    await ask_and_store(gateway, cacheable_chat("x" * 1_001))
    assert not gateway.pool.documents


async def test_answer_cache_failure_generates_answer_without_pool() -> None:
    gateway = gateway_of()
    gateway.pool.trouble = NotReady("no embedding worker is ready")
    assert not is_hit(await ask_and_store(gateway, cacheable_chat()))
    assert 'cache_lookups_total{outcome="failed"} 1.0' in gateway.state.metrics.render().decode()


async def test_answer_cache_misses_without_collection() -> None:
    gateway = gateway_of()
    gateway.pool.trouble = UnknownCollection("no collection 'answers'")
    await ask_and_store(gateway, cacheable_chat())
    assert 'cache_lookups_total{outcome="miss"} 1.0' in gateway.state.metrics.render().decode()


async def test_answer_cache_internal_error_fails_no_chat(caplog: pytest.LogCaptureFixture) -> None:
    gateway = gateway_of()
    broken: Any = RuntimeError("ours")
    gateway.pool.trouble = broken
    assert not is_hit(await ask_and_store(gateway, cacheable_chat()))
    assert "no answer was looked up" in caplog.text and not gateway.pool.documents


async def test_answer_cache_misses_when_lookup_is_slow() -> None:
    gateway = gateway_of()
    await ask_and_store(gateway, cacheable_chat())
    slow = InProcessGateway(cache_wait_ms=1)
    slow.pool = slow.state.answers._pool = gateway.pool
    answering(slow, "At ", "7")
    gateway.pool.delay = asyncio.Event()
    assert not is_hit(await ask_and_store(slow, cacheable_chat()))
    assert len(slow.log.requests) == 1
    gateway.pool.delay.set()
    assert is_hit(await ask(gateway, cacheable_chat()))


async def test_answer_cache_limits_entries_per_tenant() -> None:
    gateway = gateway_of(cache_entries_max=3)
    for number in range(12):
        await ask_and_store(gateway, cacheable_chat(f"{FERRY} {number}"))
    assert 1 < len(gateway.pool.documents) <= 3


async def test_turn_after_cached_answer_keeps_session() -> None:
    gateway = gateway_of()
    await ask_and_store(gateway, cacheable_chat())
    async with gateway.client() as client:
        hit = await client.post("/v1/chat/completions", json=cacheable_chat())
        message = {"role": "assistant", "content": "At 7"}
        messages = [*cacheable_chat()["messages"], message, {"role": "user", "content": "b"}]
        body = {**chat(), "messages": messages}
        after = await client.post("/v1/chat/completions", json=body)
    assert after.headers["x-session-id"] == hit.headers["x-session-id"]


async def test_answer_cache_ignores_malformed_documents() -> None:
    gateway = gateway_of()
    await ask_and_store(gateway, cacheable_chat())
    ((name, document),) = gateway.pool.documents.items()
    for text in ("", "[]", '{"text": "x"}', document.text.replace("When", "Where")):
        gateway.pool.documents[name] = replace(document, text=text)
        assert not is_hit(await ask(gateway, cacheable_chat()))
