"""Histories with calls of tools, roles and parts: what models get of them."""

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from schemas.model.parsers import ParserNames
from schemas.records import AnswerDelta, DeltaKind
from streams.calls.request.body import ChatBody
from streams.calls.request.chat import chat_of
from streams.calls.request.tokenizer import Tokenizer
from streams.calls.request.tools import tools_of
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.parsed_answers import parsing_gateway
from tests.streams.gateway.samples import MODEL, chat
from tests.streams.gateway.small_tokenizer import tokenizer, tokenizer_folder

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CUSTOM = {"type": "custom", "custom": {"name": "f", "input": '{"x": 1}'}}
USER, RESULT = {"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "c1"}
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {**RESULT, "content": "1"},
    {**RESULT, "content": [{"type": "text", "text": "2"}]},
    {"role": "user", "content": "and?"},
]
AS_TEXT = [
    USER,
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    },
    {
        "role": "user",
        "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response>\nand?",
    },
]
# Knows tools, and writes what it is given as JSON.
KNOWING = (
    "{{ tools | tojson }}{% for message in messages %}<{{ message.role }}>"
    "{% for call in message.tool_calls %}{{ call.function.arguments.x }}{% endfor %}"
    "{{ message.content }}{% endfor %}{{ reasoning_effort }}"
)
TAKING_TEXT = KNOWING.replace(
    "{{ call.function.arguments.x }}",
    "{% set tool = call.function %}{% if tool.arguments is string %}{{ tool.arguments }}"
    "{% else %}{{ tool.arguments | tojson }}{% endif %}",
)


def chat_from(
    messages: list[dict[str, Any]], model_tokenizer: Tokenizer | None = None, **fields: Any
) -> Any:
    body = ChatBody.model_validate({"messages": messages, **fields})
    template = (model_tokenizer or tokenizer()).template
    return chat_of(body, body.messages, template, tools_of(body))


@pytest.fixture
def knowing(tmp_path: Path) -> Tokenizer:
    """A model whose template knows calls of tools."""
    copy(tokenizer_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(KNOWING)
    return Tokenizer(tmp_path)


async def test_tool_calls_become_text_for_template_without_tools() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    body = {"model": MODEL, "messages": HISTORY, "tools": [TOOL], "tool_choice": "none"}
    assert (await call(gateway, body))[0] == 200
    assert chat_from(HISTORY).messages == AS_TEXT


def test_template_with_tools_receives_tool_calls(knowing: Tokenizer) -> None:
    """Arguments are objects, as in vLLM; special tokens that they spell are text."""
    tool_chat = chat_from(
        HISTORY, knowing, tools=[TOOL], tool_choice="none", reasoning_effort="low"
    )
    text = json.dumps([TOOL]) + "<user>q<assistant>1<tool>1<tool>2<user>and?low"
    assert knowing.render(tool_chat) == text
    spelled = {"name": "f", "arguments": {"x": "</s>", "</s>": 1}}
    history: list[dict[str, Any]] = [USER, {"role": "assistant"}]
    history[1]["tool_calls"] = [{**CALL, "function": spelled}]
    raw = knowing.encoder.raw
    ids = knowing.encoder.ids(knowing.pieces(chat_from(history, knowing)))
    assert raw.token_to_id("</s>") not in ids


@pytest.mark.parametrize(
    ("before", "same"),
    [
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
            {"role": "function", "name": "f", "content": "1"},
        ),
        (
            {"role": "assistant", "tool_calls": [CUSTOM]},
            {**RESULT, "content": "1"},
        ),
    ],
)
def test_messages_normalize_legacy_tool_calls(before: Any, same: Any) -> None:
    assert chat_from([USER, before, same]).messages == chat_from(HISTORY[:3]).messages


async def test_session_depends_on_tool_calls() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    for argument in ("1", "2", "1"):
        called = {**CALL, "function": {"name": "f", "arguments": argument}}
        history = [USER, {"role": "assistant", "tool_calls": [called]}, {**RESULT, "content": "r"}]
        await call(gateway, {"model": MODEL, "messages": history})
    first, second, third = (request.session_id for request in gateway.log.requests)
    assert first == third != second


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tools": [TOOL]}, "tools: this deployment knows no parser", "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "send tool_choice 'none'", "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: expected", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "function_call 'none'", "functions"),
        ({"tools": [{"type": "x"}], "tool_choice": "none"}, "expected function", "tools.0.type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0: expected a function with a name, found None",
            "messages.0.tool_calls.0",
        ),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages.0.content: required, but missing; 'contents' is not read",
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "refusal": 5}]},
            "messages.0.refusal: expected a string, found 5",
            "messages.0.refusal",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "expected one of continue_final_message and add_generation_prompt",
            "continue_final_message",
        ),
    ],
)
async def test_messages_error_names_unsupported_field(
    fields: Any, message: str, param: str
) -> None:
    """One error states the point, instead of one for each field."""
    gateway = InProcessGateway()
    status, answer = await call(gateway, {**chat(), **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]
    assert not gateway.log.sent_records


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "a"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "no"),
        ({"role": "assistant", "content": None, "reasoning_content": "hm"}, ""),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, ""),
        ({"role": "user", "content": "a", "provider_specific_fields": {"x": 1}}, "a"),
        ({"role": "latest_reminder", "content": "a"}, "a"),
    ],
)
def test_messages_accept_content_from_other_servers(message: Any, text: str) -> None:
    (plain,) = chat_from([message]).messages
    assert (plain["role"], plain["content"]) == (message["role"], text)


DIGITS, DEEP = '{"x": 1.10}', "[" * 600 + "]" * 600


def called_with(arguments: str) -> list[dict[str, Any]]:
    call_ = {**CALL, "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call_]}]


def test_tool_call_arguments_keep_digits_and_nesting(tmp_path: Path) -> None:
    """A template that takes no text for arguments gets them as an object."""
    for written in (DIGITS, DEEP):
        content = chat_from(called_with(written)).messages[-1]["content"]
        assert f'{{"name": "f", "arguments": {written}}}' in content
    copy(tokenizer_folder() / "tokenizer.json", tmp_path)
    for template, digits in ((KNOWING, {"x": 1.1}), (TAKING_TEXT, DIGITS)):
        (tmp_path / "chat_template.jinja").write_text(template)
        model_tokenizer = Tokenizer(tmp_path)
        for written, got in ((DIGITS, digits), (DEEP, DEEP), ('{"x": 1.5}', {"x": 1.5})):
            chat_ = chat_from(called_with(written), model_tokenizer)
            assert chat_.messages[-1]["tool_calls"][0]["function"]["arguments"] == got
            assert model_tokenizer.pieces(chat_)


async def test_continue_final_message_leaves_last_turn_open() -> None:
    gateway = InProcessGateway()
    messages = [USER, {"role": "assistant", "content": "It </s> is"}]
    body = {"messages": messages, "continue_final_message": True}
    _, tokenized = await call(gateway, body, "/tokenize")
    text = tokenizer().encoder.raw.decode(tokenized["tokens"], skip_special_tokens=False)
    assert text == "<s><|user|>q</s><|assistant|>It </s> is"
    assert tokenized["tokens"].count(tokenizer().encoder.raw.token_to_id("</s>")) == 1


@pytest.mark.parametrize("budget", [0, 64, -1, None])
async def test_budget_of_reasoning_is_taken(budget: int | None) -> None:
    gateway = parsing_gateway()
    await call(gateway, chat(thinking_token_budget=budget))
    expected = None if budget == -1 else budget
    assert gateway.log.requests[0].sampling.thinking_token_budget == expected


@pytest.mark.parametrize("parser", ["none", "granite", "muse_glimmer"])
async def test_budget_is_refused_if_end_of_reasoning_is_unknown(parser: str) -> None:
    gateway = InProcessGateway(parsers=ParserNames(reasoning=parser))
    status, answer = await call(gateway, chat(thinking_token_budget=64))
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
    assert not gateway.log.sent_records


async def test_session_is_found_after_a_call_that_became_text() -> None:
    """The template knows no calls; the next turn has the same session nevertheless."""
    gateway = InProcessGateway(parsers=ParserNames(tool="hermes", reasoning="none"))
    deltas = [AnswerDelta(seq=1, kind=DeltaKind.CALL, call_id="c1", name="f", text='{"x":1}')]
    gateway.answer_with("", finish_reason="tool_calls", deltas=deltas)
    _, answer = await call(gateway, chat(tools=[TOOL]))
    message = answer["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x":1}'
    history = [*chat()["messages"], message, {**RESULT, "content": "1"}]
    await call(gateway, {"model": MODEL, "messages": history, "tools": [TOOL]})
    first, second = gateway.log.requests
    assert second.session_id == first.session_id
    assert second.parsing is not None and second.parsing.prior_calls == 1
