"""Calls that schemathesis makes of the gateway's OpenAPI page: what is allowed by it, and what is
not. Each is answered as the page says, never with 500."""

from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import openapi
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from streams.gateway.endpoints.openapi import describe
from streams.openai.objects.openapi_shapes import CONTENT, SHAPES
from tests.fuzz.strategies import examples, text_of
from tests.fuzz.test_fuzz_http import PATHS
from tests.loop_stalls import unstalled
from tests.streams.gateway.in_process import InProcessGateway

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_headers_conformance, response_schema_conformance),
]
LABELS = (
    *("GET /health/live", "GET /health/ready", "GET /metrics", "GET /v1/models"),
    *("GET /health", "GET /ping", "POST /ping", "GET /version", "GET /load", "POST /detokenize"),
    *("GET /v1/models/{model}", "GET /v1/requests/{request_id}/events"),
    *("DELETE /v1/requests/{request_id}", "DELETE /v1/cache/{entry_id}", "POST /tokenize"),
    *("POST /v1/chat/completions", "POST /v1/completions"),
    *("POST /v1/embeddings", "POST /v1/rerank", "POST /v2/rerank", "POST /rerank"),
    *("POST /score", "POST /v1/score", "POST /v1/responses"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens"),
    *("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
    *("POST /v1/responses/{response_id}/cancel", "GET /v1/responses/{response_id}/input_items"),
    *("POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}"),
    "POST /v1/batches/{batch_id}/cancel",
)
OBJECT_LABELS = tuple(f"{method.upper()} {path}" for path, method in (*SHAPES, CONTENT))
BODIES = {f"POST {path}": good for path, (good, _) in PATHS.items()}


def answering() -> InProcessGateway:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    return gateway


@cache
def operations() -> dict[str, Any]:
    page = openapi.from_dict(describe(answering().app.fastapi))
    every = [result.ok() for result in page.get_all_operations() if isinstance(result, Ok)]
    return {operation.label: operation for operation in every}


def test_openapi_page_lists_all_operations() -> None:
    assert operations().keys() == {*LABELS, *OBJECT_LABELS}


@st.composite
def some(draw: st.DrawFn, of: Any) -> dict[str, Any]:
    """Few of these fields."""
    names = st.sets(st.sampled_from(sorted(of)), max_size=2) if of else st.just(set())
    return {name: of[name] for name in draw(names)}


@st.composite
def cases(draw: st.DrawFn, label: str) -> Any:
    """As they are drawn, or with a few fields of those: with all of them none is accepted."""
    good = BODIES.get(label)
    modes = list(GenerationMode) if good else [GenerationMode.POSITIVE]
    mode = draw(st.sampled_from(modes))
    case = draw(operations()[label].as_strategy(generation_mode=mode))
    if good and isinstance(case.body, dict) and draw(st.integers(0, 4)):
        case.body = {**good, **draw(some(case.body))}
        case.headers = draw(some(dict(case.headers)))
    return case


async def send_case(client: httpx.AsyncClient, case: Any) -> httpx.Response:
    parts = case.as_transport_kwargs(base_url="http://gateway")
    body = text_of(parts["json"]) if "json" in parts else parts.get("data")
    headers = {
        name: value.encode("latin-1", "replace") if isinstance(value, str) else value
        for name, value in parts["headers"].items()
    }
    return await client.request(
        parts["method"], parts["url"], params=parts["params"], headers=headers, content=body
    )


@pytest.mark.parametrize("label", LABELS)
@examples(15, fuzz_factor=4)
@given(data=st.data())
async def test_gateway_conforms_to_openapi_page(label: str, data: st.DataObject) -> None:
    await check(data.draw(cases(label)))


@pytest.mark.parametrize("label", OBJECT_LABELS)
@examples(5, fuzz_factor=2)
@given(data=st.data())
async def test_gateway_conforms_to_openapi_page_for_files_and_stores(
    label: str, data: st.DataObject
) -> None:
    await check(data.draw(cases(label)))


async def check(case: Any) -> None:
    async with answering().client() as client:
        response = await unstalled(send_case(client, case))
    case.validate_response(response, checks=CHECKS)
