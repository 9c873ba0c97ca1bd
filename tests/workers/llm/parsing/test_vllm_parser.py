"""Each of vLLM's parsers, token by token: what it reads, and that a takeover changes nothing."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from schemas.errors import ConfigError, InvalidRequest
from schemas.model.parser_rules import NONE
from schemas.model.parsers import REASONING_PARSERS, TOOL_PARSERS, ParserNames
from schemas.records import AnswerDelta, Parsing, Sampling, Structured, StructuredKind, WorkPhase
from schemas.rules.tokens import pack_tokens
from schemas.settings import ModelSettings
from streams.calls.stream.parsed import ParsedAnswer
from tests.workers.fakes import work
from tests.workers.llm.parsing.samples import (
    ARGUMENTS,
    CALLS,
    CONTENT,
    NAME,
    REASONED,
    REASONING_TEXT,
    TOOL,
    UNREAD_REASONING,
    UNTESTED_CALLS,
    UNTESTED_REASONING,
)
from workers.llm.parsing.parsers import ParsedEnd, load_parsers
from workers.models.sim import make_sim_model, make_tokenizer

pytestmark = pytest.mark.vllm
THINKS = json.dumps({"enable_thinking": True, "thinking": True})
AUTO = Parsing(tools=json.dumps([TOOL]), tool_choice="auto")
SAMPLING = Sampling(max_tokens=1_000)
# What the tokenizers of the parsers' models have as tokens.
_MARKERS = re.compile(
    r"<[|\uff5c][^<>]*?[|\uff5c]>|<\|\"\|>|<\|(?:tool_call|channel)>|<(?:tool_call|channel)\|>"
    r"|</?[a-z_|]+(?::[a-z_]+)?>|\[/?[A-Z_]+\]|\]<\]minimax\[>\["
)
_PLAIN = re.compile(r"</?(?:city|days|parameter|function|invoke|param)>")
_ALWAYS = ("<think>", "</think>", "<|python_tag|>", "<|tool_call|>", "<assistant>", "[TOOL_CALLS]")


class ParsedModel:
    """A model whose tokenizer has the markers of an answer, and its parsers."""

    def __init__(self, folder: Path, text: str, **names: str) -> None:
        from workers.llm.parsing.vllm_parser import VllmParsers  # imports vLLM

        markers = [marker for marker in _MARKERS.findall(text) if not _PLAIN.fullmatch(marker)]
        self.tokenizer = make_tokenizer()
        added_tokens = dict.fromkeys([*markers, *_ALWAYS])
        self.tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added_tokens])
        make_sim_model(folder)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        parser_names = ParserNames(
            tool=names.get("tool", NONE), reasoning=names.get("reasoning", NONE)
        )
        self.parsers = VllmParsers(folder, "m", parser_names)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def begin(
        self, parsing: Parsing, prior_ids: Sequence[int] = (), sampling: Sampling = SAMPLING
    ) -> Any:
        prompt = [*self.ids("Question?"), *prior_ids]
        order = work(
            "r1",
            WorkPhase.DECODE,
            0,
            prompt_tokens=pack_tokens(prompt),
            prior_tokens=len(prior_ids),
            parsing=parsing,
            sampling=sampling,
        )
        parser = self.parsers.begin(order, prompt)
        parser.feed(prior_ids)
        return parser


def parsed(
    model: ParsedModel, parsing: Parsing, text: str, step: int = 1
) -> tuple[ParsedAnswer, ParsedEnd]:
    """Return what a parser reads; after a takeover behind each `step`-th token, it must read the
    same."""
    ids = model.ids(text)
    parser = model.begin(parsing)
    deltas: list[list[AnswerDelta]] = [parser.feed([token_id]) for token_id in ids]
    end: ParsedEnd = parser.finish("stop")
    for count in range(step, len(ids) + 1, step):
        successor = model.begin(parsing, ids[:count])
        rest = [successor.feed([token_id]) for token_id in ids[count:]]
        assert (rest, successor.finish("stop")) == (deltas[count:], end), count
    together = model.begin(parsing)
    assert together.feed(ids) == [delta for some in deltas for delta in some]
    answer = ParsedAnswer()
    for some in (*deltas, end.deltas):
        answer.add(some)
    return answer, end


@pytest.mark.parametrize("name", CALLS)
def test_parser_reads_tool_call_and_continues_after_any_token(name: str, tmp_path: Path) -> None:
    model = ParsedModel(tmp_path, CALLS[name], tool=name)
    answer, end = parsed(model, AUTO, CALLS[name])
    (tool_call,) = answer.calls.values()
    assert (tool_call.name, json.loads(tool_call.arguments)) == (NAME, ARGUMENTS)
    assert end.finish_reason == "tool_calls"
    assert tool_call.call_id


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "llama3_json", "pythonic", "minimax_m2", "kimi_k2", "glm45"]
)
def test_long_arguments_are_read_in_larger_pieces(name: str, tmp_path: Path) -> None:
    city = "Llanfair on the river " * 60
    text = f"{CALLS[name].replace('Paris', city)} {CALLS[name]}"
    answer, _ = parsed(ParsedModel(tmp_path, text, tool=name), AUTO, text, step=131)
    first = json.loads(answer.calls[0].arguments)
    assert (first["city"].strip(), first["days"]) == (city.strip(), 3)
    if name not in ("llama3_json", "pythonic"):  # they end with their first call
        assert json.loads(answer.calls[1].arguments) == ARGUMENTS


@pytest.mark.parametrize("name", REASONED)
def test_parser_reads_reasoning_and_continues_after_any_token(name: str, tmp_path: Path) -> None:
    model = ParsedModel(tmp_path, REASONED[name], reasoning=name)
    answer, end = parsed(model, Parsing(template_kwargs=THINKS), REASONED[name])
    assert (answer.reasoning.strip(), answer.content.strip()) == (REASONING_TEXT, CONTENT)
    bounds_reasoning = ParserNames(reasoning=name).bounds_reasoning
    assert bool(model.begin(Parsing()).thinking_end) is bounds_reasoning
    assert end.finish_reason == "stop"


@pytest.mark.parametrize("name", UNREAD_REASONING)
def test_parser_continues_after_any_token(name: str, tmp_path: Path) -> None:
    text = UNREAD_REASONING[name]
    answer, _ = parsed(ParsedModel(tmp_path, text, reasoning=name), Parsing(), text)
    assert CONTENT in answer.content or CONTENT in answer.reasoning


def test_every_parser_has_a_sample_or_a_reason_for_none() -> None:
    assert CALLS.keys() | UNTESTED_CALLS == TOOL_PARSERS
    assert REASONED.keys() | UNREAD_REASONING.keys() | UNTESTED_REASONING == REASONING_PARSERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ParsedModel:
    """A model with hermes' calls and qwen3's reasoning."""
    folder = tmp_path_factory.mktemp("model")
    return ParsedModel(folder, CALLS["hermes"], tool="hermes", reasoning="qwen3")


def test_answer_may_have_reasoning_content_and_several_calls(model: ParsedModel) -> None:
    text = f"{REASONING_TEXT}</think>{CONTENT} {CALLS['hermes']}\n{CALLS['hermes']}"
    answer, end = parsed(model, AUTO, text)
    assert (answer.reasoning, answer.content) == (REASONING_TEXT, f"{CONTENT} ")
    first, second = answer.calls.values()
    assert first.arguments == second.arguments and first.call_id != second.call_id
    assert end.reasoning_tokens == len(model.ids(REASONING_TEXT))
    one_call, _ = parsed(model, replace(AUTO, parallel_tool_calls=False), text)
    assert [*one_call.calls.values()] == [first]
    no_reasoning, _ = parsed(model, replace(AUTO, include_reasoning=False), text)
    assert (no_reasoning.reasoning, len(no_reasoning.calls)) == ("", 2)


def test_white_space_around_calls_is_no_content(model: ParsedModel) -> None:
    """Clients take content before a call for the answer; without a call, or without tools, white
    space stays."""
    text = f"{REASONING_TEXT}</think>\n\n{CALLS['hermes']}\n{CALLS['hermes']}\n"
    answer, _ = parsed(model, AUTO, text)
    assert (answer.content, len(answer.calls)) == ("", 2)
    answer, _ = parsed(model, AUTO, f"{REASONING_TEXT}</think>\n\n{CONTENT} \n {CALLS['hermes']}")
    assert (answer.content, len(answer.calls)) == (f"\n\n{CONTENT} \n ", 1)
    for parsing in (AUTO, Parsing()):
        answer, _ = parsed(model, parsing, f"{REASONING_TEXT}</think>\n\n ")
        assert answer.content == "\n\n "


def test_cut_answer_ends_for_its_length(model: ParsedModel) -> None:
    parser = model.begin(AUTO)
    parser.feed(model.ids(f"</think>{CALLS['hermes'][:60]}"))
    assert parser.finish("length").finish_reason == "length"


def test_stop_string_is_not_parsed(model: ParsedModel) -> None:
    stopping = model.begin(Parsing(), sampling=Sampling(max_tokens=99, stop=("fine",)))
    deltas = [*stopping.feed(model.ids(f"</think>{CONTENT[:-1]}")), *stopping.finish("stop").deltas]
    assert "".join(delta.text for delta in deltas) == "All "
    ends = model.ids("<|im_end|>")
    parser = model.begin(Parsing())
    assert "im_end" not in str(parser.feed([*model.ids(f"</think>{CONTENT}"), *ends]))


def test_tool_choice_becomes_form_of_answer(model: ParsedModel) -> None:
    """The form is the same for each attempt, and no form is set that the model need not keep."""
    required = model.begin(replace(AUTO, tool_choice="required")).sampling
    assert required.structured is not None
    assert required.structured.kind is StructuredKind.STRUCTURAL_TAG
    choice = json.dumps({"type": "function", "function": {"name": NAME}})
    for_name = model.begin(replace(AUTO, tool_choice=choice)).sampling
    assert for_name.structured is not None and NAME in for_name.structured.value
    assert model.begin(AUTO).sampling.structured is None
    form = Structured(kind=StructuredKind.JSON_SCHEMA, value='{"type":"object"}')
    with_form = Sampling(max_tokens=99, structured=form)
    assert model.begin(Parsing(), sampling=with_form).sampling.structured == form
    for choice_text, sampling in (("required", required), (choice, for_name)):
        forced = model.begin(replace(AUTO, tool_choice=choice_text), sampling=with_form)
        assert forced.sampling.structured == sampling.structured, "it leaves no room for the form"
    either = model.begin(AUTO, sampling=with_form).sampling.structured
    assert either is not None and either.kind is StructuredKind.STRUCTURAL_TAG
    assert '"type": "or"' in either.value  # a call, or an answer in the form


def test_form_beside_tools_without_grammar_is_invalid(tmp_path: Path) -> None:
    """The form would forbid every call, without a word."""
    form = Structured(kind=StructuredKind.JSON_OBJECT, value="")
    granite = ParsedModel(tmp_path, CALLS["granite4"], tool="granite4")
    with pytest.raises(InvalidRequest, match="granite4 has no grammar"):
        granite.begin(AUTO, sampling=replace(SAMPLING, structured=form))
    assert granite.begin(AUTO).sampling.structured is None


def test_unusable_tools_are_invalid(model: ParsedModel) -> None:
    with pytest.raises(InvalidRequest, match="tools: "):
        model.begin(replace(AUTO, tools='[{"type": "function"}]'))


async def test_parsers_load_by_settings(tmp_path: Path) -> None:
    make_sim_model(tmp_path)
    path = str(tmp_path)
    assert await load_parsers(ModelSettings(path=path)) is None
    assert await load_parsers(ModelSettings(path=path, tool_parser="hermes")) is not None
    with pytest.raises(ConfigError, match="model.tool_parser jamba"):
        await load_parsers(ModelSettings(path=path, tool_parser="jamba"))
