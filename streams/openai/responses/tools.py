"""The tools of a call of /v1/responses, and the choice among them, in the form of chats.

`function` and `custom` tools are run by the client. A custom tool is offered to the model as a
function with one text argument, and a tool of a `namespace` as a function with both names.
`file_search` is a search of this server, before the answer. A call with a tool that nobody here can
run is refused, unless it has others, as agents always send some that they do not count on
(`gateway.unserved_tools`), or its `tool_choice` excludes that tool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from schemas.errors import InvalidRequest
from streams.calls.errors import shorten
from streams.calls.request.responses_body import (
    FileSearchTool,
    ResponsesBody,
    parse_fields,
    refuse_extras,
)
from streams.calls.request.tools import TOOLS_MAX, check_function
from streams.openai.responses.custom_input import PARAMETERS

FUNCTION: Final = "function"
CUSTOM: Final = "custom"
FILE_SEARCH: Final = "file_search"
NAMESPACE: Final = "namespace"
_CALLED = (FUNCTION, CUSTOM)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTools:
    """The tools that a call uses."""

    functions: Sequence[Json]  # as chats have them
    choice: Any  # as chats have it; None without functions
    search: FileSearchTool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool that the model calls and the client runs."""

    kind: str
    name: Any  # a text, if the tool is one
    namespace: str
    fields: Json
    where: str  # its place, for errors

    @property
    def function_name(self) -> str:
        """Return the name of the function that the model is offered."""
        return function_name(self.namespace, str(self.name))

    def is_meant_by(self, choice: Any) -> bool:
        """Return whether a tool choice names it, or its namespace."""
        match choice:
            case {"type": "namespace", "name": name}:
                return bool(self.namespace) and name == self.namespace
            case {"type": kind, "name": name, "namespace": str(namespace)}:
                return (kind, name, namespace) == (self.kind, self.name, self.namespace)
            case {"type": kind, "name": name}:
                return (kind, name) == (self.kind, self.function_name)
        return False

    def function(self) -> Json:
        """Return the function that the model is offered, as chats have it; raises
        InvalidRequest."""
        fields = ("name", "description", "parameters", "strict")
        function = {name: self.fields[name] for name in fields if self.fields.get(name) is not None}
        if self.kind == CUSTOM:
            description = _description(self.fields, self.where)
            function |= {"description": description, "parameters": PARAMETERS}
            function.pop("strict", None)
        if self.namespace and isinstance(self.name, str):
            function["name"] = self.function_name
        check_function(function, self.where)
        return {"type": FUNCTION, FUNCTION: function}


def function_name(namespace: Any, name: str) -> str:
    """Return the name of the function that is offered for a tool of a namespace, if it has one."""
    return f"{namespace}__{name}" if namespace and isinstance(namespace, str) else name


def called_tools(tools: Sequence[Json]) -> Iterator[CalledTool]:
    """Yield the tools that the model calls, with those of namespaces."""
    for i, tool in enumerate(tools):
        if tool.get("type") != NAMESPACE:
            yield from _called_tool(tool, "", f"tools.{i}")
            continue
        name, inner_tools = tool.get("name"), tool.get("tools")
        for j, inner in enumerate(inner_tools if isinstance(inner_tools, list) else ()):
            if isinstance(inner, dict) and isinstance(name, str):
                yield from _called_tool(inner, name, f"tools.{i}.tools.{j}")


def _called_tool(tool: Json, namespace: str, where: str) -> Iterator[CalledTool]:
    kind = tool.get("type")
    if kind not in _CALLED:
        return
    inner = tool.get(kind)
    if isinstance(inner, dict):  # in the form of chats
        tool, where = inner, f"{where}.{kind}"
    yield CalledTool(
        kind=kind, name=tool.get("name"), namespace=namespace, fields=tool, where=where
    )


def _is_unserved(tool: Any) -> bool:
    """Return whether a tool is one that only a server can run, and this one does not."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind != FILE_SEARCH


def tools_of(body: ResponsesBody, *, ignores_unserved: bool = False) -> ResponseTools:
    """Return the tools that a call uses; raises InvalidRequest.

    With `ignores_unserved`, tools that nobody here can run are left out if the call has others.
    """
    tools = body.tools or []
    called = list(called_tools(tools))
    if len(called) > TOOLS_MAX:
        raise InvalidRequest(f"tools: expected at most {TOOLS_MAX}, found {len(called)}", "tools")
    functions = [tool.function() for tool in called]
    places = [i for i, tool in enumerate(tools) if not _is_offered(tool)]
    if ignores_unserved and functions:
        places = [i for i in places if not _is_unserved(tools[i])]
    choice = body.tool_choice
    if choice in ("none", None, "auto"):
        search = None if choice == "none" else _search(tools, places)
        return ResponseTools(functions=functions, choice=choice, search=search)
    if choice == "required" and tools:
        search = _search(tools, places)
        choice = "required" if search is None else "auto"  # a search is the call of a tool
        return ResponseTools(functions=functions, choice=choice, search=search)
    if choice == {"type": FILE_SEARCH} and places:
        search = _search(tools, places)
        return ResponseTools(functions=functions, choice="auto", search=search)
    match choice:
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            return _allowed(tools, called, mode, allowed)
    is_one = isinstance(choice, dict) and choice.get("type") != NAMESPACE
    for tool in called if is_one else ():
        if tool.is_meant_by(choice):
            function_choice = _choice_of(tool)
            return ResponseTools(functions=functions, choice=function_choice, search=None)
    raise _wrong_choice(choice)


def _is_offered(tool: Json) -> bool:
    """Return whether a tool is offered to the model, as one or several functions."""
    return tool.get("type") in _CALLED or (
        tool.get("type") == NAMESPACE
        and isinstance(tool.get("name"), str)
        and isinstance(inner_tools := tool.get("tools"), list)
        and all(isinstance(inner, dict) and inner.get("type") in _CALLED for inner in inner_tools)
    )


def _choice_of(tool: CalledTool) -> Json:
    return {"type": FUNCTION, FUNCTION: {"name": tool.function_name}}


def _wrong_choice(choice: Any) -> InvalidRequest:
    return InvalidRequest(
        "tool_choice: expected none, auto, required or a tool that the call has, found "
        f"{shorten(choice)}",
        "tool_choice",
    )


def _allowed(
    tools: Sequence[Json], called: Sequence[CalledTool], mode: str, allowed: Sequence[Any]
) -> ResponseTools:
    """Return the tools among which a choice allows to choose."""
    functions = [tool.function() for tool in called]
    places = []
    for choice in allowed:
        if any(tool.is_meant_by(choice) for tool in called):
            continue
        kind = choice.get("type") if isinstance(choice, dict) else choice
        own_places = [
            i for i, tool in enumerate(tools) if not _is_offered(tool) and tool.get("type") == kind
        ]
        if not own_places:
            raise _wrong_choice(choice)
        places += own_places
    chosen = [
        _choice_of(tool) for tool in called if any(tool.is_meant_by(choice) for choice in allowed)
    ]
    search = _search(tools, sorted(set(places)))
    if not chosen and search is None:
        raise _wrong_choice({"type": "allowed_tools", "tools": list(allowed)})
    if not chosen:
        return ResponseTools(functions=functions, choice="none", search=search)
    mode = mode if search is None else "auto"
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
    return ResponseTools(functions=functions, choice=choice, search=search)


def _description(tool: Json, where: str) -> str:
    """Return what the model is told about a custom tool: with the grammar of its input, if any."""
    text, form = tool.get("description") or "", tool.get("format") or {"type": "text"}
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{where}.description: expected a string, found {shorten(text)}", f"{where}.description"
        )
    match form:
        case {"type": "text"}:
            return text
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(grammar)}:
            return f"{text}\n\nThe input has to match this {syntax} grammar:\n{grammar}".strip()
    raise InvalidRequest(
        f"{where}.format: expected text, or a grammar with its syntax, lark or regex, and its "
        f"definition, found {shorten(form)}",
        f"{where}.format",
    )


def _search(tools: Sequence[Json], places: Sequence[int]) -> FileSearchTool | None:
    """Return the file search at these places of the tools; raises InvalidRequest for any other
    tool."""
    searches = [_file_search(tools[i], f"tools.{i}") for i in places]
    if len(searches) > 1:
        raise InvalidRequest("tools: expected one file_search at most, found several", "tools")
    return searches[0] if searches else None


def _file_search(value: Json, where: str) -> FileSearchTool:
    kind = value.get("type")
    if kind == NAMESPACE:
        raise InvalidRequest(
            f"{where}: expected a namespace with a name and a list of function and custom tools, "
            f"found {shorten(value)}",
            where,
        )
    if kind != FILE_SEARCH:
        raise InvalidRequest(
            f"{where}.type: expected function, custom, namespace or file_search, found "
            f"{shorten(kind)}; no other tools are served: leave it out, or exclude it by "
            "tool_choice",
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


def stored_tools(tools: Sequence[Json]) -> list[Json]:
    """Return the tools as a response repeats them: with the fields that OpenAI's types require."""
    return [_stored(tool) for tool in tools]


def _stored(tool: Json) -> Json:
    kind = tool.get("type")
    if kind not in _CALLED:
        return tool
    inner = tool.get(kind)
    flat = {**inner, "type": kind} if isinstance(inner, dict) else tool
    return {"parameters": None, "strict": None, **flat} if kind == FUNCTION else flat
