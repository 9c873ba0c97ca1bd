"""HTTP as nobody means it: no 500, no crash, no stall of the event loop."""

import json
from typing import Any
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from streams.anthropic.body import CountTokensBody, MessagesBody
from streams.calls.embedding import EmbeddingsBody, RerankBody, ScoreBody
from streams.calls.request.body import ChatBody, CompletionBody, TokenizeBody
from streams.calls.request.responses_body import ResponsesBody
from tests.fuzz.strategies import JSON, changed_bytes, examples, text_of
from tests.loop_stalls import unstalled
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, completion, message

PATHS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (chat(), ChatBody),
    "/v1/completions": (completion(), CompletionBody),
    "/v1/responses": ({"model": MODEL, "input": "x"}, ResponsesBody),
    "/v1/messages": (message(), MessagesBody),
    "/v1/messages/count_tokens": (message(), CountTokensBody),
    "/tokenize": ({"prompt": "x"}, TokenizeBody),
    "/v1/embeddings": ({"model": "letters", "input": ["x"]}, EmbeddingsBody),
    "/v1/rerank": ({"model": "letters", "query": "x", "documents": ["y"]}, RerankBody),
    "/score": ({"model": "letters", "text_1": "x", "text_2": ["y"]}, ScoreBody),
}
HEADERS = (
    *("x-session-id", "x-priority", "x-deadline-ms", "x-trivium-weights", "x-trivium-policy"),
    *("last-event-id", "traceparent", "authorization", "x-trivium-on-disconnect", "x-other"),
)


def answering() -> InProcessGateway:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    return gateway


@examples(80, fuzz_factor=3)
@given(st.sampled_from(sorted(PATHS)), st.data())
async def test_gateway_survives_bodies_with_changed_fields(path: str, data: st.DataObject) -> None:
    body, kind = PATHS[path]
    names = st.sampled_from(sorted(kind.model_fields)) | st.text(max_size=10)
    changes: dict[str, Any] = data.draw(st.dictionaries(names, JSON, max_size=3))
    status, _ = await unstalled(call(answering(), text_of({**body, **changes}), path))
    assert status < 500


@examples(50, fuzz_factor=3)
@given(st.sampled_from(sorted(PATHS)), st.data())
async def test_gateway_survives_bodies_with_changed_bytes(path: str, data: st.DataObject) -> None:
    raw = data.draw(changed_bytes(json.dumps(PATHS[path][0]).encode()) | st.binary(max_size=200))
    assert (await unstalled(call(answering(), raw, path)))[0] < 500


@examples(50, fuzz_factor=3)
@given(st.dictionaries(st.sampled_from(HEADERS), st.text(max_size=60), max_size=4))
async def test_gateway_survives_random_headers(headers: dict[str, str]) -> None:
    raw = {name: value.encode("utf-8", "replace") for name, value in headers.items()}
    async with answering().client() as client:
        answer = await unstalled(
            client.post("/v1/chat/completions", json=chat(), headers=raw)  # type: ignore[arg-type]  # bytes serve
        )
    assert answer.status_code < 500


@examples(35, fuzz_factor=3)
@given(
    st.text(max_size=40),
    st.sampled_from(["/events", "", "/x"]),
    st.sampled_from(["GET", "DELETE", "POST"]),
)
async def test_gateway_survives_random_request_paths(
    request_id: str, end: str, method: str
) -> None:
    name = quote(request_id.encode("utf-8", "replace"), safe="")
    async with answering().client() as client:
        answer = await unstalled(client.request(method, f"/v1/requests/{name}{end}"))
    assert answer.status_code < 500
