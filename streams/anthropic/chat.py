"""Converts a body in Anthropic's form to the chat that answers it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from schemas.errors import InvalidRequest
from streams.anthropic.body import (
    EXTENSIONS,
    CountTokensBody,
    MessagesBody,
    ThinkingConfig,
    ToolChoice,
)
from streams.anthropic.turns import chat_messages
from streams.calls.errors import shorten
from streams.calls.request.body import ChatBody, strings
from streams.calls.request.intake import STOP_CHARS_MAX, STOPS_MAX, CallIntake
from streams.calls.request.responses_body import parse_fields

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Templates have one of these names for the switch; others ignore both.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


def chat_body(body: CountTokensBody) -> ChatBody:
    """Return the body of the chat that answers a call; raises InvalidRequest."""
    extras = body.model_extra or {}
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": chat_messages(body.system, body.messages),
        **{name: extras[name] for name in EXTENSIONS & extras.keys()},
        **_tools(body.tools or (), body.tool_choice),
        **_thinking(body.thinking, extras.get("chat_template_kwargs")),
        **_continuation(body),
    }
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "answer", "schema": config.format.json_schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields |= {
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": list(strings("stop_sequences", body.stop_sequences, STOPS_MAX, STOP_CHARS_MAX)),
            "user": body.metadata and body.metadata.user_id,
        }
    return parse_fields(ChatBody, fields)


def limited(intake: CallIntake, body: MessagesBody) -> CallIntake:
    """Limit the answer to its `max_tokens`, or to the rest of the model's context if that is less:
    clients ask for as many tokens as the largest models have. Limit its thinking, if the body does
    and the model's parser can."""
    budget = body.thinking_tokens_max if intake.card.parsers.bounds_reasoning else None
    samplings = [
        replace(
            sampling,
            max_tokens=min(sampling.max_tokens, body.max_tokens),
            thinking_token_budget=sampling.thinking_token_budget if budget is None else budget,
        )
        for sampling in intake.samplings
    ]
    return replace(intake, samplings=samplings)


def _continuation(body: CountTokensBody) -> dict[str, bool]:
    """Return the fields with which the answer continues the last turn, if that is an answer."""
    last, where = body.messages[-1], f"messages.{len(body.messages) - 1}.content"
    if last.role != "assistant":
        return {}
    blocks = [] if isinstance(last.content, str) else last.content
    if not last.content or any(block.get("type") == "tool_use" for block in blocks):
        raise InvalidRequest(
            f"{where}: the last turn is the assistant's; expected text that the answer continues, "
            f"or the results of its tools in a next turn, found {shorten(last.content)}",
            where,
        )
    return {"continue_final_message": True, "add_generation_prompt": False}


def _thinking(config: ThinkingConfig | None, variables: Any) -> dict[str, Any]:
    """Return whether the model thinks, and whether the answer shows it: only if the call asks."""
    thinks = config is not None and config.type != "disabled"
    switches = dict.fromkeys(_THINKING_SWITCHES, thinks)
    overrides = variables if isinstance(variables, Mapping) else {}
    return {
        "chat_template_kwargs": switches | dict(overrides),
        "include_reasoning": config is not None and config.is_shown,
    }


def _tools(tools: Sequence[dict[str, Any]], choice: ToolChoice | None) -> dict[str, Any]:
    """Return the tools and the choice between them in a chat's form."""
    functions = [_function(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    names = set[str]()
    for i, function in enumerate(functions):
        if (name := function["name"]) in names:
            raise InvalidRequest(f"tools.{i}.name: {name!r} is a tool already", f"tools.{i}.name")
        names.add(name)
    if not functions:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice: expected tools to choose from, found none", "tools")
        return {}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "auto",
    }
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if choice.name not in names:
            raise InvalidRequest(
                f"tool_choice.name: expected one of the tools, found {shorten(choice.name)}",
                "tool_choice.name",
            )
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": _CHOICES[choice.type]}


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type: {shorten(kind)} is a tool of Anthropic's servers or models; only tools "
            "with an input_schema of the caller's own (type custom) are served",
            f"{where}.type",
        )
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name: expected 1 to 128 letters, digits, _ or -, found {shorten(name)}",
            f"{where}.name",
        )
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"{where}.input_schema: expected a JSON schema of an object, found {shorten(schema)}",
            f"{where}.input_schema",
        )
    function: dict[str, Any] = {"name": name, "parameters": {"type": "object", **schema}}
    if (description := tool.get("description")) is not None:
        if not isinstance(description, str):
            raise InvalidRequest(
                f"{where}.description: expected a string, found {shorten(description)}",
                f"{where}.description",
            )
        function["description"] = description
    if tool.get("strict") is not None:
        if not isinstance(tool["strict"], bool):
            raise InvalidRequest(f"{where}.strict: expected true or false", f"{where}.strict")
        function["strict"] = tool["strict"]
    return function
