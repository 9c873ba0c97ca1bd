"""Fields and endpoints that the gateway refuses: the page for callers has them, with the reasons of
the errors. vLLM's are all known.
"""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.calls.embedding import EmbeddingsBody, RerankBody, ScoreBody
from streams.calls.request.body import ChatBody, CompletionBody
from streams.calls.request.refused import EMBEDDING_REFUSED, HARMLESS, REFUSED
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, completion

PAGE = Path(__file__).parents[4] / "infra/docs/integrate.md"
REGION = "completion-sampling-params]"  # vLLM marks it for its own pages


def protocol(part: str) -> str:
    """The source of the request models of one of vLLM's endpoints."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return (
        Path(spec.submodule_search_locations[0]) / "entrypoints" / part / "protocol.py"
    ).read_text()


def annotated(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names with a type, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


class RefusedExample(NamedTuple):
    """An example of the page's table: fields of a call, its kind, and why it is refused."""

    fields: dict[str, Any]
    kind: str
    why: str


def table_rows(head: str) -> Iterator[list[str]]:
    """The cells of each row of the page's table that begins with this head."""
    lines = iter(PAGE.read_text().partition(head)[2].splitlines()[2:])
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def page_examples() -> Iterator[RefusedExample]:
    """Every example, for each kind of call that its row names."""
    for examples, kinds, why in table_rows("| refused, for example |"):
        for kind in kinds.split(", "):
            for text in examples.strip("`").split("`, `"):
                yield RefusedExample(json.loads(f"{{{text}}}"), kind, why)


EXAMPLES = [*page_examples()]
ENDPOINTS = [
    name.strip("`") for names, _ in table_rows("| endpoint | why |") for name in names.split(", ")
]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": ("/v1/chat/completions", chat()),
    "completions": ("/v1/completions", completion()),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "ranks": ("/rerank", {"query": "a", "documents": ["b"]}),
    "scores": ("/score", {"queries": "a", "documents": ["b"]}),
}


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{at.kind}-{next(iter(at.fields))}" for at in EXAMPLES]
)
async def test_field_is_refused_with_reason_of_page(example: RefusedExample) -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    path, body = CALLS[example.kind]
    status, answer = await call(gateway, body | example.fields, path)
    name = next(iter(example.fields))
    assert (status, answer["error"]["param"]) == (400, name), answer
    assert answer["error"]["message"].startswith(f"{name}: ")
    assert example.why in answer["error"]["message"]
    assert not gateway.log.requests


def test_page_has_every_refused_field() -> None:
    """Those of embeddings, ranks and scores that chats have, too, stand in the table once."""
    names = {name for example in EXAMPLES for name in example.fields}
    assert set(REFUSED) | set(EMBEDDING_REFUSED) <= names
    assert {example.kind for example in EXAMPLES} == set(CALLS)
    assert len(EXAMPLES) > 80


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_values_without_effect_are_taken(name: str) -> None:
    for value in (None, *REFUSED[name].neutral):
        gateway = InProcessGateway()
        gateway.answer_with("ok")
        status, answer = await call(gateway, chat(**{name: value}))
        assert status == 200, answer


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_endpoint_of_page_is_not_found(endpoint: str) -> None:
    method, path = endpoint.split(" ")
    async with InProcessGateway().client() as client:
        response = await client.request(method, path, json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("part", "body"), [("chat_completion", ChatBody), ("completion", CompletionBody)]
)
def test_integration_page_lists_refused_sampling_parameters(
    part: str, body: type[ChatBody]
) -> None:
    """The fields are read from vLLM's source, which need not be imported."""
    text = protocol(f"openai/{part}")
    lines = text.splitlines()
    first, last = (number for number, line in enumerate(lines, 1) if REGION in line)
    vllm_fields = {name for name, line in annotated(ast.parse(text)) if first < line < last}
    assert {"temperature", "top_p"} & vllm_fields or "top_k" in vllm_fields
    refused = vllm_fields - set(body.model_fields) - HARMLESS
    assert refused <= {name for example in EXAMPLES for name in example.fields}


def test_embedding_fields_cover_those_of_vllm() -> None:
    """Every field that is not served is known as such, not reported as misspelt."""
    vllm_fields = set()
    for part in ("base", "embed", "scoring"):
        for model in ast.parse(protocol(f"pooling/{part}")).body:
            if isinstance(model, ast.ClassDef) and re.search(
                "Mixin|^Embedding.*Request|^Rerank.*Request|^Score.*Request", model.name
            ):
                vllm_fields |= {name for name, _ in annotated(model)}
    bodies = (EmbeddingsBody, RerankBody, ScoreBody)
    ours = {name for body in bodies for name in body.model_fields}
    assert vllm_fields >= ours - {"return_documents"}
    assert vllm_fields - ours - HARMLESS - set(EMBEDDING_REFUSED) == {"max_total_tokens"}, (
        "a variable"
    )
