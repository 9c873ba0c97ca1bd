"""Converts a call of /v1/responses to the chat that answers it, and to the search before it."""

from collections.abc import Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.calls.request.body import ChatBody
from streams.calls.request.responses_body import (
    EXTENSIONS,
    LOGPROBS,
    FileSearchTool,
    ResponsesBody,
    TextFormat,
    parse_fields,
)
from streams.openai.objects.filters import filter_text
from streams.openai.responses.tools import tools_of


def chat_body(
    body: ResponsesBody, messages: Sequence[dict[str, Any]], *, ignores_unserved: bool = False
) -> ChatBody:
    """Return the body of the chat that answers a call; raises InvalidRequest.

    With `ignores_unserved`, tools that nobody here can run are left out if the call has others.
    """
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
    verbosity = None if body.text is None else body.text.verbosity
    if verbosity is not None:
        fields["chat_template_kwargs"] = {
            "verbosity": verbosity,
            **(fields.get("chat_template_kwargs") or {}),
        }
    form = None if body.text is None else body.text.format
    if form is not None:
        fields["response_format"] = _response_format(form)
    tools = tools_of(body, ignores_unserved=ignores_unserved)
    if tools.functions:
        fields |= {"tools": tools.functions, "tool_choice": tools.choice}
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if tools.search is not None:
        if fields.get("retrieval") is not None:
            raise InvalidRequest(
                "retrieval: the call has file_search; use one of them", "retrieval"
            )
        fields["retrieval"] = _retrieval(tools.search)
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
