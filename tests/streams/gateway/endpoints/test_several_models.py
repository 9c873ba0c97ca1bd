"""A gateway of several models and adapters: what each call is sent as, and how it is answered."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.streams.gateway.answering import answering
from tests.streams.gateway.endpoints.several_models import LAW, NAMES, SMALL, gateway_of_three
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, completion, events_of, message, text_of
from tests.streams.gateway.small_tokenizer import model_folder
from tests.streams.gateway.streamed_call import TEXTS, WITH_IDS, whole_stream

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("name", [*NAMES, None])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat()),
        ("/v1/completions", completion()),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", message()),
    ],
)
async def test_request_names_model_and_adapter_of_call(
    path: str, body: dict[str, Any], name: str | None
) -> None:
    if name is None and path == "/v1/messages":
        return  # Anthropic's clients always name one
    gateway = gateway_of_three()
    body = {key: value for key, value in body.items() if key != "model"}
    status, answer = await call(gateway, {**body, **({"model": name} if name else {})}, path)
    assert (status, answer["model"]) == (200, name or MODEL), answer
    (request,) = gateway.log.requests
    card = gateway.state.models.cards[name or MODEL]
    assert (request.model, request.adapter) == (card.model, card.adapter)
    assert request.cache_scope == ("+9:org/law@2" if card.adapter else "")


async def test_cache_scopes_of_adapters_are_apart() -> None:
    """Whatever the names and the salts, since they are a caller's to choose."""
    names = ("x", "x/y", "+1:x", "x+1:x")
    gateway = InProcessGateway(other_cards=[replace(LAW, name=n, adapter=n) for n in names])
    gateway.answer_with("hello")
    salts = (None, "s", "y/s", "+1:x", "/s", "+1:x/s")
    for name in (MODEL, *names):
        for salt in salts:
            status, answer = await call(gateway, {**chat(cache_salt=salt), "model": name})
            assert status == 200, answer
    scopes = {request.cache_scope for request in gateway.log.requests}
    assert len(scopes) == len(salts) * (1 + len(names))


@pytest.mark.parametrize("name", NAMES)
async def test_stream_of_any_model_is_resumed_elsewhere(name: str) -> None:
    gateway, peer = gateway_of_three(), gateway_of_three()
    gateway.log.on_request = None
    stream = await whole_stream(gateway, {**chat(stream=True), "model": name}, TEXTS)
    peer.log.frames = gateway.log.frames
    path = f"/v1/requests/{stream.headers['x-request-id']}/events"
    async with peer.client() as client:
        rest = await client.get(path, headers={**WITH_IDS, "Last-Event-ID": stream.ids[1]})
    whole = events_of(stream.text)
    assert text_of(whole[:2]) + text_of(events_of(rest.text)) == "".join(TEXTS)
    assert {event["model"] for event in whole[:-1]} == {name}
    assert {event["model"] for event in events_of(rest.text)[:-1]} == {name}


async def test_limits_and_tokens_are_those_of_named_model() -> None:
    gateway = gateway_of_three()
    prompt = "x" * 100
    for name, status in ((MODEL, 200), (SMALL.name, 400)):
        status_code, answer = await call(
            gateway, {**completion(prompt), "model": name}, "/v1/completions"
        )
        assert status_code == status, answer
        body = {"prompt": "hello", "model": name}
        _, tokens = await call(gateway, body, "/tokenize")
        assert tokens["max_model_len"] == gateway.state.models.cards[name].max_model_len
        _, text = await call(gateway, {"tokens": tokens["tokens"], "model": name}, "/detokenize")
        assert text == {"prompt": "hello"}
        counted, answer = await call(
            gateway, {**message(), "model": name}, "/v1/messages/count_tokens"
        )
        assert counted == 200 and answer["input_tokens"] > 0


@pytest.mark.parametrize(
    "name", ["", "other", "org/law", "org/law@2@", "@docs", f"{MODEL}\0", "\u202e", "x" * 9_999]
)
async def test_unknown_name_is_404_with_names_that_exist(name: str) -> None:
    gateway = gateway_of_three()
    for path, body in (
        (CHATS, chat()),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", message()),
        ("/v1/messages/count_tokens", message()),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        status, answer = await call(gateway, {**body, "model": name}, path)
        if not name:  # as if it named none
            assert status in (200, 400), answer
            continue
        assert status == 404, answer
        text = answer["error"]["message"]
        assert all(repr(model) in text for model in NAMES) and len(text) < 400
    assert len(gateway.log.requests) <= 3


@pytest.mark.parametrize("name", [7, 1.5, True, [], ["a"], {}, {"a": 1}])
async def test_name_of_another_type_is_400(name: Any) -> None:
    gateway = gateway_of_three()
    for path, body in ((CHATS, chat()), ("/v1/responses", {"input": "hello"}), ("/tokenize", {})):
        status, answer = await call(gateway, {**body, "model": name}, path)
        assert (status, answer["error"]["param"]) == (400, "model")
    assert not gateway.log.requests


@pytest.mark.parametrize("name", NAMES)
async def test_model_without_worker_is_503_and_others_are_served(name: str) -> None:
    gateway = gateway_of_three(wait_ms=0)
    gateway.log.away_models = {name}
    async with gateway.client() as client:
        for model in NAMES:
            answer = await client.post(CHATS, json={**chat(), "model": model})
            assert answer.status_code == (503 if model == name else 200)
            if model == name:
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "not_ready"
        ready = await client.get("/health/ready")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ok", "reasons": [f"model {name!r}: none"]}
        assert (await client.get("/health")).status_code == 200


async def test_only_models_with_tokens_of_passages_search() -> None:
    gateway = gateway_of_three()
    sought: dict[str, Any] = {"retrieval": {"collection": "docs"}}
    tool = {"type": "file_search", "vector_store_ids": ["docs"]}
    for path, body, param in (
        (CHATS, {**chat(**sought), "model": "small"}, "retrieval"),
        (CHATS, {**chat(), "model": "small@docs"}, "model"),
        ("/v1/responses", {"input": "x", "model": "small", "tools": [tool]}, "retrieval"),
    ):
        status, answer = await call(gateway, body, path)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert "'small' has others" in answer["error"]["message"]
    assert not gateway.log.requests
    status, answer = await call(gateway, {**chat(), "model": f"{LAW.name}@docs"})
    assert (status, answer["model"]) == (200, LAW.name)
    (request,) = gateway.log.requests
    assert request.adapter == LAW.name
    assert request.retrieval is not None and request.retrieval.collection == "docs"


async def test_models_endpoint_tells_parents_lengths_and_parsers() -> None:
    async with gateway_of_three().client() as client:
        listed = (await client.get("/v1/models")).json()["data"]
        fields = ("id", "root", "parent", "max_model_len", "tool_parser")
        assert [tuple(model[field] for field in fields) for model in listed] == [
            (MODEL, MODEL, None, 512, "none"),
            (LAW.name, "law-2", MODEL, 512, "hermes"),
            ("small", "small", None, 64, "none"),
        ]
        for model in listed:
            assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        searching = (await client.get(f"/v1/models/{LAW.name}@docs")).json()
        assert (searching["id"], searching["parent"]) == (f"{LAW.name}@docs", MODEL)


async def test_next_response_may_name_another_model() -> None:
    gateway = answering(other_cards=[LAW, SMALL])
    _, first = await call(gateway, {"input": "hello", "model": LAW.name}, "/v1/responses")
    body = {"input": "more", "model": "small", "previous_response_id": first["id"]}
    status, second = await call(gateway, body, "/v1/responses")
    assert (status, second["model"]) == (200, "small"), second
    models = [orjson.loads(record.options)["model"] for record in gateway.log.responses.records]
    assert models == [LAW.name, "small"]
    assert [request.model for request in gateway.log.requests] == [MODEL, "small"]


async def test_prompts_have_tokens_of_named_model(tmp_path: Path) -> None:
    """Also where another process encodes a long text; many calls at once load one tokenizer."""
    folder = model_folder(tmp_path / "small", template="{{ messages[0].content }}", token="<|new|>")
    gateway = InProcessGateway(other_cards=[replace(SMALL, folder=folder, encoding="small")])
    gateway.answer_with("yes")
    for name in (MODEL, *["small"] * 3):
        status, answer = await call(gateway, {**completion("<|new|>"), "model": name}, COMPLETIONS)
        assert status == 200, answer
    counts = [len(request.prompt_tokens) // 4 for request in gateway.log.requests]
    assert counts[0] > 1 and counts[1:] == [1, 1, 1]
    served = await gateway.state.models.model_named("small")
    served.tokenizer.encoder.thread_chars_max = 1
    for path, body in ((COMPLETIONS, completion("<|new|>")), (CHATS, chat("a <|new|>"))):
        assert (await call(gateway, {**body, "model": "small"}, path))[0] == 200
    whole, of_chat = gateway.log.requests[-2:]
    assert len(whole.prompt_tokens) == 4
    tokens = await call(gateway, {"prompt": "a <|new|>", "model": "small"}, "/tokenize")
    assert len(of_chat.prompt_tokens) // 4 > tokens[1]["count"], "a message's text is no token"
