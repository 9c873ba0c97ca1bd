"""The page for callers names every sampling parameter of vLLM that the gateway refuses."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from streams.gateway.request.body import ChatBody, CompletionBody
from streams.gateway.request.fields import HARMLESS

PAGE = Path(__file__).parents[4] / "infra/docs/integrate.md"
REGION = "completion-sampling-params]"  # vLLM marks it for its own pages


@pytest.mark.parametrize(
    ("part", "body"), [("chat_completion", ChatBody), ("completion", CompletionBody)]
)
def test_refused_sampling_parameters_are_listed(part: str, body: type[ChatBody]) -> None:
    """Read from vLLM's source, which need not be imported (issue 10, 27)."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    folder = Path(spec.submodule_search_locations[0])
    text = (folder / "entrypoints" / "openai" / part / "protocol.py").read_text()
    lines = text.splitlines()
    first, last = (number for number, line in enumerate(lines, 1) if REGION in line)
    theirs = {
        each.target.id
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and first < each.lineno < last
    }
    assert {"temperature", "top_p"} & theirs or "top_k" in theirs
    refused = theirs - set(body.model_fields) - HARMLESS
    told = PAGE.read_text()
    assert not [name for name in sorted(refused) if f"`{name}`" not in told]
