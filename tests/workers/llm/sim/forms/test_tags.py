"""Texts of structural tags, as vLLM makes them for calls of tools."""

import json
from functools import cache
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from schemas.records import Structured, StructuredKind
from workers.llm.sim.forms.text import draw_text

xgrammar = pytest.importorskip("xgrammar", reason="it comes with vLLM")
pytestmark = pytest.mark.vllm

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "strict": True, "parameters": WEATHER},
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "deep": {"type": "boolean"}},
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "search"}}
HERMES = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [
        {
            "type": "tag",
            "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
            "content": {"type": "json_schema", "json_schema": WEATHER},
            "end": "}\n</tool_call>",
        }
    ],
}


def draw(form: Any, seed: int) -> str:
    value = json.dumps({"type": "structural_tag", "format": form})
    return draw_text(Structured(kind=StructuredKind.STRUCTURAL_TAG, value=value), seed)


@cache
def byte_compiler() -> Any:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=[256]))


def is_whole(value: str, text: str) -> bool:
    """Whether a text, byte by byte, is one of a structural tag."""
    matcher = xgrammar.GrammarMatcher(byte_compiler().compile_structural_tag(value))
    accepted = all(matcher.accept_token(byte) for byte in text.encode())
    return accepted and bool(matcher.accept_token(256))


@cache
def tags_of_vllm() -> dict[str, str]:
    """Every kind of tag that vLLM makes for tool calls."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionNamedToolChoiceParam,
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers.structural_tag_registry import (
        SUPPORTED_STRUCTURAL_TAG_MODELS,
        get_model_structural_tag,
    )

    tools = [ChatCompletionToolsParam(**tool) for tool in TOOLS]
    named_choice = ChatCompletionNamedToolChoiceParam(**NAMED)
    choices = {"auto": "auto", "required": "required", "named": named_choice}
    return {
        f"{model}, {name}, {reasoning}": tag.model_dump_json()
        for model in sorted(SUPPORTED_STRUCTURAL_TAG_MODELS)
        for name, choice in choices.items()
        for reasoning in (False, True)
        if (tag := get_model_structural_tag(model, tools, choice, reasoning)) is not None
    }


def test_text_follows_each_tag_that_vllm_makes_for_calls() -> None:
    tags = tags_of_vllm()
    assert len(tags) > 90
    for name, value in tags.items():
        form = Structured(kind=StructuredKind.STRUCTURAL_TAG, value=value)
        texts = [draw_text(form, seed) for seed in range(6)]
        assert all(is_whole(value, text) for text in texts), name
        assert texts == [draw_text(form, seed) for seed in range(6)], name
        if "auto" not in name:
            assert all("get_weather" in text or "search" in text for text in texts), name


def test_free_text_has_words_and_sometimes_calls() -> None:
    texts = [draw(HERMES, seed) for seed in range(60)]
    calls = [text for text in texts if "<tool_call>" in text]
    assert 10 < len(calls) < 50
    assert all(text[:1].isalpha() for text in texts)
    for text in calls:
        body = text.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
        arguments = json.loads(body)["arguments"]
        assert {*arguments} >= {"city", "days"} and isinstance(arguments["days"], int)


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"type": "const_string", "value": "grün"}, {"grün"}),
        (
            {
                "type": "tag",
                "begin": {"type": "token", "token": "<|call|>"},
                "content": {"type": "regex", "pattern": "[ab]"},
                "end": {"type": "token", "token": "<|end|>"},
            },
            {"<|call|>a<|end|>", "<|call|>b<|end|>"},
        ),
        (
            {"type": "repeat", "min": 2, "max": 2, "content": {"type": "regex", "pattern": "[xy]"}},
            {"xx", "xy", "yx", "yy"},
        ),
    ],
    ids=["const_string", "tag", "repeat"],
)
def test_texts_cover_form(form: Any, texts: set[str]) -> None:
    assert {draw(form, seed) for seed in range(60)} == texts


def test_older_form_of_tags_is_drawn() -> None:
    value = json.dumps(
        {
            "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f"],
        }
    )
    form = Structured(kind=StructuredKind.STRUCTURAL_TAG, value=value)
    texts = [draw_text(form, seed) for seed in range(20)]
    assert any("<f>" in text for text in texts)


@pytest.mark.parametrize(
    "value",
    [
        "7",
        "{",
        '{"type": "structural_tag"}',
        '{"type": "structural_tag", "format": {"type": "poem"}}',
        '{"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}',
        '{"type": "structural_tag", "format": {"type": "token", "token": 5}}',
        '{"structures": [{}], "triggers": []}',
    ],
)
def test_malformed_tags_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="response_format: the simulated engine"):
        draw_text(Structured(kind=StructuredKind.STRUCTURAL_TAG, value=value), 1)
