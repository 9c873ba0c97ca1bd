"""Converts a call of /v1/responses to the chat that answers it, and to the search before it."""

from collections.abc import Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.calls.errors import shorten
from streams.calls.request.body import ChatBody
from streams.calls.request.responses_body import (
    EXTENSIONS,
    LOGPROBS,
    FileSearchTool,
    ResponsesBody,
    TextFormat,
    parse_fields,
    refuse_extras,
)
from streams.openai.objects.filters import filter_text


def chat_body(body: ResponsesBody, messages: Sequence[dict[str, Any]]) -> ChatBody:
    """Return the body of the chat that answers a call; raises InvalidRequest."""
    extras = body.model_extra or {}
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(messages),
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens,
        "user": body.user,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        **{name: extras[name] for name in EXTENSIONS & extras.keys()},
    }
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    form = None if body.text is None else body.text.format
    if form is not None:
        fields["response_format"] = _response_format(form)
    functions = [tool for tool in body.tools or () if tool.get("type") == "function"]
    if functions:
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
        fields["tool_choice"] = body.tool_choice
    tool = file_search_of(body)
    if tool is not None:
        if fields.get("retrieval") is not None:
            raise InvalidRequest(
                "retrieval: the call has file_search; use one of them", "retrieval"
            )
        fields["retrieval"] = _retrieval(tool)
    return parse_fields(ChatBody, fields)


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.json_schema is None:
        raise InvalidRequest(
            "text.format.schema: required with type json_schema, but missing", "text.format.schema"
        )
    return {
        "type": form.type,
        "json_schema": {"name": form.name, "schema": form.json_schema, "strict": form.strict},
    }


def _retrieval(tool: FileSearchTool) -> dict[str, Any]:
    retrieval: dict[str, Any] = {"collection": tool.vector_store_ids[0]}
    if tool.max_num_results is not None:
        retrieval["k"] = tool.max_num_results
    if tool.filters is not None:
        retrieval["filter"] = filter_text(tool.filters, "tools.0.filters")
    if tool.ranking_options is not None and tool.ranking_options.score_threshold is not None:
        retrieval["min_score"] = tool.ranking_options.score_threshold
    return retrieval


def file_search_of(body: ResponsesBody) -> FileSearchTool | None:
    """Return the file search that the call chooses, or None; raises InvalidRequest."""
    tools = [
        _file_search(tool, f"tools.{i}")
        for i, tool in enumerate(body.tools or ())
        if tool.get("type") != "function"
    ]
    if len(tools) > 1:
        raise InvalidRequest("tools: expected one file_search at most, found several", "tools")
    match body.tool_choice:
        case None | "auto":
            return tools[0] if tools else None
        case "none":
            return None
        case "required" | {"type": "file_search"} if tools:
            return tools[0]
        case "required" | {"type": "function"} if len(tools) < len(body.tools or ()):
            return None  # the chat's check decides about functions
    raise InvalidRequest(
        "tool_choice: expected none, auto, required or a tool that the call has, found "
        f"{shorten(body.tool_choice)}",
        "tool_choice",
    )


def _file_search(value: dict[str, Any], where: str) -> FileSearchTool:
    if value.get("type") != "file_search":
        raise InvalidRequest(
            f"{where}.type: expected file_search, found {shorten(value.get('type'))}; no other "
            "tools are served",
            f"{where}.type",
        )
    tool = parse_fields(FileSearchTool, value, where)
    refuse_extras(where, tool)
    if tool.ranking_options is not None:
        refuse_extras(f"{where}.ranking_options", tool.ranking_options)
    if len(tool.vector_store_ids) != 1:
        raise InvalidRequest(
            f"{where}.vector_store_ids: expected one collection, found "
            f"{len(tool.vector_store_ids)}",
            f"{where}.vector_store_ids",
        )
    return tool
