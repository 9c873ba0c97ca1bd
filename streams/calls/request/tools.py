"""The tools of a chat: which the model sees, which it may call, and how its answer is parsed.

Workers parse answers (`workers/llm/parsing`). The form of a call is checked here: names, schemas,
and that the model has a parser.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from schemas.errors import InvalidRequest
from schemas.model.parser_rules import NONE
from schemas.model.parsers import ParserNames
from schemas.records import Parsing
from streams.calls.errors import shorten
from streams.calls.request.body import ChatBody, TemplateFields
from streams.calls.request.chat import Chat
from streams.calls.request.check_process import CHECK_MS, CHECK_PROCESS
from streams.calls.request.form import json_text

TOOLS_MAX: Final = 128  # OpenAI's limit
TOOLS_CHARS_MAX: Final = 262_144  # of all tools together, as JSON
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
Json = dict[str, Any]


def tools_of(body: TemplateFields) -> Sequence[Json]:
    """Return the tools of a body, which may be in OpenAI's older field; raises InvalidRequest."""
    tools, name = body.tools, "tools"
    if not tools and body.functions:
        tools = [{"type": "function", "function": function} for function in body.functions]
        name = "functions"
        if body.function_call != "none":
            raise InvalidRequest(
                "functions: only `tools` are called; send these functions as `tools`, or "
                "function_call 'none'",
                name,
            )
    if len(tools or ()) > TOOLS_MAX:
        raise InvalidRequest(f"tools: expected at most {TOOLS_MAX}, found {len(tools or ())}", name)
    for i, tool in enumerate(tools or ()):
        _check_tool(tool, f"{name}.{i}")
    return tools or ()


def _check_tool(tool: Json, where: str) -> None:
    if tool.get("type", "function") != "function":
        raise InvalidRequest(
            f"{where}.type: expected function, found {shorten(tool.get('type'))}", f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(
            f"{where}.function: expected a function with a name, found {shorten(tool)}",
            f"{where}.function",
        )
    check_function(function, f"{where}.function")


def check_function(function: Json, where: str) -> None:
    """Check the name of a function, and that its parameters are an object; raises
    InvalidRequest."""
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name: expected 1 to 128 letters, digits or _.:/-, found {shorten(name)}",
            f"{where}.name",
        )
    if not isinstance(parameters, dict | None):
        raise InvalidRequest(
            f"{where}.parameters: expected a JSON schema, found {shorten(parameters)}",
            f"{where}.parameters",
        )


def check_tools(body: TemplateFields) -> None:
    """Raise InvalidRequest for tools without names, or a choice that is none of them."""
    _chosen(tools_of(body), body.tool_choice)


async def parsing_of(
    body: TemplateFields, tools: Sequence[Json], chat: Chat, names: ParserNames, tenant: str = ""
) -> Parsing | None:
    """Return how the answer of a chat is parsed, None if it is text. `tools` are those of the body
    (`tools_of`). Raises InvalidRequest."""
    choice = body.tool_choice if body.tools or not body.functions else body.function_call
    chosen, choice_text = _chosen(tools, choice)
    is_called = bool(chosen) and choice_text != "none"
    if is_called and names.tool == NONE:
        raise InvalidRequest(
            "tools: this deployment knows no parser for the tool calls of its model; set "
            "model.tool_parser to one of vLLM's, or send tool_choice 'none'",
            "tools",
        )
    if not is_called and names.reasoning == NONE:
        return None
    if is_called:
        await _check_schemas(tools, tenant)
    extras, variables = body.model_extra or {}, chat.variables
    return Parsing(
        tools=json_text("tools", chosen, "JSON") if is_called else "",
        tool_choice=choice_text if is_called else "none",
        parallel_tool_calls=extras.get("parallel_tool_calls") is not False,
        include_reasoning=extras.get("include_reasoning") is not False,
        template_kwargs=json_text("chat_template_kwargs", variables, "JSON") if variables else "",
        prior_calls=sum(len(message.get("tool_calls", ())) for message in chat.turns),
    )


def budget_of(body: ChatBody, names: ParserNames) -> int | None:
    """Return the most tokens of reasoning, or None for no bound of its own. Raises InvalidRequest
    if the parser of the model does not say where its reasoning ends."""
    budget = body.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if not names.bounds_reasoning:
        raise InvalidRequest(
            "thinking_token_budget: expected a model whose parser knows where its reasoning ends, "
            f"found model.reasoning_parser {names.reasoning}; limit the whole answer by max_tokens",
            "thinking_token_budget",
        )
    return budget


def _chosen(tools: Sequence[Json], choice: Any) -> tuple[Sequence[Json], str]:
    """Return the tools that may be called, and the choice as a record has it."""
    names = {tool["function"]["name"] for tool in tools}
    match choice:
        case None:
            return tools, "auto" if tools else "none"
        case "none" | "auto":
            return tools, choice
        case "required" if tools:
            return tools, choice
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return tools, json.dumps({"type": "function", "function": {"name": name}})
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*allowed]}}:
            allowed_names = {_allowed_name(tool) for tool in allowed}
            if allowed_names and allowed_names <= names and mode in ("auto", "required"):
                return [tool for tool in tools if tool["function"]["name"] in allowed_names], mode
    raise InvalidRequest(
        "tool_choice: expected none, auto, required, or a function that the call has in `tools`, "
        f"found {shorten(choice)}",
        "tool_choice",
    )


def _allowed_name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


async def _check_schemas(tools: Sequence[Json], tenant: str) -> None:
    text = json_text("tools", tools, "JSON")
    if len(text) > TOOLS_CHARS_MAX:
        raise InvalidRequest(
            f"tools: expected at most {TOOLS_CHARS_MAX} characters, found {len(text)}", "tools"
        )
    schemas = [tool["function"].get("parameters") or {} for tool in tools]
    try:  # a list of schemas is itself one
        wrong = await CHECK_PROCESS.check(
            "json_schema", json_text("tools", {"allOf": schemas}, "JSON"), CHECK_MS, tenant
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: {error.message}", "tools") from error
    if wrong:
        raise InvalidRequest(f"tools: parameters: {wrong}", "tools")
