"""Endpoints beside the path: models, tokenize, and cancelling."""

from typing import Any

import pytest

from schemas.fleet import Member
from schemas.records import (
    CancelReason,
    CollectionState,
    EmbedCapability,
    MemberKind,
    MemberState,
    OutcomeKind,
    Registration,
    Role,
    SearchLoad,
)
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import MODEL, chat, events_of, frame, stream_end
from tests.streams.gateway.streamed_call import (
    accepted_requests,
    streamed_call,
)
from tests.waits import until


async def test_routes_list_models_tokenize_and_report_unknown_paths() -> None:
    async with InProcessGateway().client() as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert (await client.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        missing = await client.get("/v1/models/a/b")
        assert missing.json()["error"]["code"] == "model_not_found"
        body = {**chat("hello"), "return_token_strs": True}
        tokenized = await client.post("/tokenize", json=body)
        assert tokenized.json() == {
            "count": 5,
            "max_model_len": 512,
            "tokens": [0, 3, 275, 1, 4],
            "token_strs": ["<s>", "<|user|>", "hello", "</s>", "<|assistant|>"],
        }
        plain = await client.post("/tokenize", json=chat("hello"))
        assert plain.json() == {**tokenized.json(), "token_strs": None}
        both = await client.post("/tokenize", json={**chat(), "prompt": "x"})
        assert both.status_code == 400
        nowhere = await client.get("/v2/chat")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
        wrong = await client.put("/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        for response in (missing, tokenized, both, nowhere, wrong):
            assert response.headers["x-request-id"].startswith("r")


async def test_gateway_serves_probe_and_monitor_paths_of_vllm() -> None:
    """guidellm, Helm charts and load balancers ask for these paths."""
    gateway = InProcessGateway()
    async with gateway.client() as client:
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            healthy = await client.request(method, path)
            assert (healthy.status_code, healthy.content) == (200, b"")
            assert healthy.headers["x-request-id"].startswith("r")
            assert (await client.head(path)).status_code == 200
            gateway.log.reasons = ["no workers"]
            waiting = await client.request(method, path)
            assert (waiting.status_code, waiting.json()["reasons"]) == (503, ["no workers"])
            assert waiting.headers["retry-after"] == "1"
            gateway.log.reasons = []
        assert (await client.get("/health/ready")).json() == {"status": "ok", "reasons": []}
        version = (await client.get("/version")).json()["version"]
        assert version == (await client.get("/openapi.json")).json()["info"]["version"]
        async with streamed_call(gateway, chat(n=2)):
            await accepted_requests(gateway, 2)
            assert (await client.get("/load")).json() == {"server_load": 2}


async def test_detokenize_returns_text_of_token_ids() -> None:
    async with InProcessGateway().client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": "hello"})).json()["tokens"]
        for model_fields in ({}, {"model": MODEL}):
            text = await client.post("/detokenize", json={"tokens": tokens, **model_fields})
            assert text.json() == {"prompt": "hello"}
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        for body, param in (
            ({"tokens": [-1]}, "tokens.0"),
            ({"tokens": [10**30]}, "tokens"),
            ({"tokens": [1, 300]}, "tokens"),
            ({"tokens": "hello"}, "tokens"),
            ({"tokens": [1], "model": "other"}, "model"),
            ({"tokens": [1], "text": "x"}, "text"),
        ):
            wrong = await client.post("/detokenize", json=body)
            assert wrong.status_code in (400, 404)
            assert wrong.json()["error"]["param"] == param, wrong.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/assistants", 404),
        ("POST", "/v1/responses/input_tokens", 404),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/v1/models/mine", 404),
        ("PUT", "/v1/responses/resp_1", 405),
        ("GET", "/v1/embeddings", 405),
        ("DELETE", "/health", 405),
    ],
)
async def test_unknown_routes_return_404_or_405(method: str, path: str, status: int) -> None:
    """A fixed path segment in place of an id is no id that lacks a method."""
    async with InProcessGateway().client() as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert f"{method} {path}: " in response.json()["error"]["message"]
    assert ("allow" in response.headers) == (status == 405)


def ready(role: Role, load: SearchLoad | None = None, **fields: Any) -> Member:
    registration = Registration(
        member_id=role, epoch=1, kind=MemberKind.WORKER, roles=(role,), started_ms=0, **fields
    )
    return Member(registration=registration, seen_ms=0, state=MemberState.READY, search=load)


def embedding_worker() -> Member:
    capability = EmbedCapability(embedder="mini@1", dim=8, tokens_max=256)
    return ready(Role.EMBEDDING, embedding=capability)


def retrieval_worker(*names: str) -> Member:
    collections = [CollectionState(name=n, dim=8, metric="cosine", documents=1) for n in names]
    return ready(Role.RETRIEVAL, SearchLoad(collections=collections))


async def test_models_endpoint_lists_every_usable_model() -> None:
    """It lists embedding models, too, and collections where these have no owners."""
    for keys in ((), ("key",)):
        gateway = InProcessGateway(api_keys=keys)
        gateway.log.members = [embedding_worker(), retrieval_worker("answers", "handbook", "vs_1")]
        async with gateway.client() as client:
            client.headers["authorization"] = "Bearer key"
            models = (await client.get("/v1/models")).json()["data"]
            assert (models[0]["tool_parser"], models[0]["reasoning_parser"]) == ("none", "none")
            assert "tool_parser" not in models[-1]
            of_collections = [] if keys else [f"{MODEL}@handbook"]
            assert [model["id"] for model in models] == [MODEL, *of_collections, "mini"]
            assert models[-1]["max_model_len"] == 256
            assert [model["root"] for model in models] == [MODEL] * len(models[:-1]) + ["mini"]
            assert {model["parent"] for model in models} == {None}
            permissions = [permission for model in models for permission in model["permission"]]
            assert [permission["allow_sampling"] for permission in permissions] == [
                model["id"] != "mini" for model in models
            ]
            assert len({permission["id"] for permission in permissions}) == len(models)
            for model in models:
                assert (await client.get(f"/v1/models/{model['id']}")).json() == model
            for name in (f"{MODEL}@other", "mini@1"):
                assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
            missing = await client.get("/v1/models/mini@2")
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


async def test_delete_cancels_request_and_ends_stream_with_error() -> None:
    gateway = InProcessGateway()
    async with gateway.client() as client, streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, ["a"]))
        response = await client.delete("/v1/requests/chatcmpl-" + request.request_id)
        assert response.status_code == 200
        assert response.json()["id"] == request.request_id
        end = stream_end(request.request_id, ["a"], kind=OutcomeKind.CANCELLED)
        await gateway.log.push(frame(request.request_id, [], end=end))
        await until(lambda: stream.over)
    (cancellation,) = gateway.log.cancellations
    assert cancellation.reason is CancelReason.CLIENT_REQUEST
    *chunks, error = events_of(stream.text)
    assert error["error"]["code"] == "cancelled"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None], "what was cut off did not finish"


async def test_delete_forwards_cancellation_to_other_gateway() -> None:
    gateway = InProcessGateway()
    async with gateway.client() as client:
        unknown = await client.delete("/v1/requests/r1")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
        assert "X-Session-Id" in unknown.json()["error"]["message"]
        written = await client.delete("/v1/requests/r1", headers={"X-Session-Id": "s1"})
    assert written.status_code == 202
    (cancellation,) = gateway.log.cancellations
    assert (cancellation.request_id, cancellation.session_id) == ("r1", "s1")


@pytest.mark.parametrize("request_id", ["a%0d%0ab", "%0d%0a%0d%0a", "%00", "%ff", "x" * 5_000, "é"])
async def test_ids_in_paths_never_inject_headers(request_id: str) -> None:
    """An encoded line break in the path must not become one in a header."""
    gateway = InProcessGateway()
    async with gateway.client() as client:
        for method, end in (("GET", "/events"), ("DELETE", "")):
            answer = await client.request(method, f"/v1/requests/{request_id}{end}")
            assert answer.status_code in (400, 404)
            assert answer.headers["x-request-id"].replace("-", "").isalnum()
