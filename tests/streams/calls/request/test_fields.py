"""Fields of vLLM's that the gateway refuses: it knows them, and the page for callers names them."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from streams.calls.embedding import EmbeddingsBody, RerankBody, ScoreBody
from streams.calls.request.body import ChatBody, CompletionBody
from streams.calls.request.refused import EMBEDDING_REFUSED, HARMLESS

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
    page = PAGE.read_text()
    assert not [name for name in sorted(refused) if f"`{name}`" not in page]


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
