"""Converts a chat's body to the input of the model's template: messages, tools and variables.

If the template supports tool calls and their results in a history, it gets them in OpenAI's form.
Other templates get them as text, in the form that many models were trained with. This module does
not render.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from schemas.errors import InvalidRequest
from streams.calls.errors import shorten
from streams.calls.request.body import Message, TemplateFields
from streams.calls.request.tokenizer import Chat, Tokenizer

_TEXT_PARTS = {  # by type: the field with the text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_LEFT_OUT_PARTS = ("thinking", "reasoning")  # of earlier answers; so is a message's `reasoning`
_RESULT, _RESULT_BEFORE = "tool", "function"  # roles of a tool's result, new and old

_DEPTH_MAX = 100  # depth of a call's arguments

Json = dict[str, Any]


def chat_of(body: TemplateFields, messages: Sequence[Message], tokenizer: Tokenizer) -> Chat:
    """Return the messages of a body, with its fields for the template; raises InvalidRequest."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: expected one of continue_final_message and "
            "add_generation_prompt, found both",
            "continue_final_message",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    keeps_digits = tokenizer.takes_text_arguments or not tokenizer.writes_tool_calls
    plain = [_plain(message, f"messages.{i}", keeps_digits) for i, message in enumerate(messages)]
    return Chat(
        messages=plain if tokenizer.writes_tool_calls else _in_words(plain),
        tools=_tools(body),
        variables=variables,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continues_last=continues,
    )


def _tools(body: TemplateFields) -> Sequence[Json]:
    """Return the tools that the template shows to the model. Raises InvalidRequest if the call asks
    for tool calls."""
    tools, choice, name = body.tools, body.tool_choice, "tools"
    if not tools and body.functions:
        tools = [{"type": "function", "function": function} for function in body.functions]
        choice, name = body.function_call, "functions"
    if choice not in (None, "none", "auto") or (tools and choice != "none"):
        raise InvalidRequest(
            f"{name}: calls of tools are not generated yet; for an answer in text send "
            f"{'tool_choice' if name == 'tools' else 'function_call'} 'none', or leave them out",
            name,
        )
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"{name}.{i}: expected a function with a name, found {shorten(tool)}", f"{name}.{i}"
            )
    return tools or ()


def _plain(message: Message, where: str, keeps_digits: bool) -> Json:
    """Return a message as templates take it.

    Other fields are ignored, because clients send back whatever an answer of any server had. Raises
    InvalidRequest for a message without anything to read.
    """
    content, extras = message.content, message.model_extra or {}
    calls = _calls(message, where, keeps_digits)
    if content is None and message.role == "assistant":
        content = extras.get("refusal")
        if not isinstance(content, str | None):
            raise InvalidRequest(
                f"{where}.refusal: expected a string, found {shorten(content)}", f"{where}.refusal"
            )
    elif content is None and (unread_fields := [name for name, value in extras.items() if value]):
        raise InvalidRequest(
            f"{where}.content: required, but missing; {unread_fields[0][:80]!r} is not read",
            f"{where}.content",
        )
    role = {"developer": "system", _RESULT_BEFORE: _RESULT}.get(message.role, message.role)
    fields: Json = {"role": role, "content": _content(content, f"{where}.content")}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if calls:
        fields["tool_calls"] = calls
    return fields


def _content(content: str | Sequence[Json] | None, where: str) -> str:
    """Return the content as text; parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind in _LEFT_OUT_PARTS:
            continue
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequest(
                f"{where}.{i}.type: expected text, found {shorten(kind)}; only text is served",
                f"{where}.{i}.type",
            )
        if not isinstance(part.get(field), str):
            raise InvalidRequest(f"{where}.{i}.{field}: expected a string", f"{where}.{i}.{field}")
        texts.append(part[field])
    return "\n".join(texts)


def _calls(message: Message, where: str, keeps_digits: bool) -> list[Json]:
    """Return an assistant's tool calls, with their arguments as objects if possible."""
    if message.function_call is not None:
        function = _function_call(message.function_call, where, keeps_digits)
        return [{"type": "function", "function": function}]
    calls = []
    for i, call in enumerate(message.tool_calls or ()):
        kind = call.get("type") or "function"
        called = call.get(kind) if isinstance(kind, str) else None
        function = _function_call(called, f"{where}.tool_calls.{i}", keeps_digits)
        calls.append({"id": call.get("id"), "type": "function", "function": function})
    return calls


def _function_call(function: Any, where: str, keeps_digits: bool) -> Json:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f"{where}: expected a function with a name, found {shorten(function)}", where
        )
    arguments = function.get("arguments", function.get("input"))  # `input` for custom tools
    if isinstance(arguments, str):
        arguments = _read(arguments, keeps_digits)
    return {"name": function["name"], "arguments": {} if arguments is None else arguments}


def _read(arguments: str, keeps_digits: bool) -> Any:
    """Parse the JSON text of arguments. Returns the text itself if it is nested too deeply or no
    JSON, as models may write, and, if `keeps_digits`, if a float would be written with other
    digits."""
    try:
        value = json.loads(arguments or "{}", parse_float=_as_written if keeps_digits else float)
    except (ValueError, RecursionError):
        return arguments
    return arguments if _is_deeper(value, _DEPTH_MAX) else value


def _as_written(digits: str) -> float:
    if repr(number := float(digits)) != digits:
        raise ValueError("another text stands for that float")
    return number


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(child, depth - 1) for child in inner)


def _in_words(messages: Sequence[Json]) -> list[Json]:
    """Write tool calls and results as text, for a template without tools. Calls are added to the
    text before them. Results become a message of the user, joined with the user's next message."""
    plain_messages: list[Json] = []
    joins = False  # whether the last message has results
    for message in messages:
        text, is_result = message["content"], message["role"] == _RESULT
        if is_result:
            text = f"<tool_response>\n{text}\n</tool_response>"
        for call in message.get("tool_calls", ()):
            text += f"\n<tool_call>\n{_spell(**call['function'])}\n</tool_call>"
        role = "user" if is_result else message["role"]
        if joins and role == "user":
            plain_messages[-1] = {
                **plain_messages[-1],
                "content": f"{plain_messages[-1]['content']}\n{text}",
            }
            joins = is_result
            continue
        plain = {"role": role, "content": text.lstrip("\n") if "tool_calls" in message else text}
        if "name" in message and not is_result:
            plain["name"] = message["name"]
        plain_messages.append(plain)
        joins = is_result
    return plain_messages


def _spell(name: str, arguments: Any) -> str:
    """Write a call as JSON; arguments that are a text of JSON stay as they are."""
    written = _json(arguments)
    if isinstance(arguments, str) and arguments.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            json.loads(arguments)
            written = arguments
    return f'{{"name": {_json(name)}, "arguments": {written}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
