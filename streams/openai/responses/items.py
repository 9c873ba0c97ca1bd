"""Items of a call of /v1/responses: checks them, and converts them to messages of a chat.

A chat has messages, tool calls and their results. Reasoning and searches are parts of an answer
that a client sends back. They are stored with the call, but no prompt has them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.calls.errors import shorten

Item = dict[str, Any]
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "assistant", "system", "developer")
SEARCH_CALL, REASONING, REFERENCE = "file_search_call", "reasoning", "item_reference"
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # by type: the arguments
_RESULTS = ("function_call_output", "custom_tool_call_output")


def items_of(request_input: str | Sequence[Item], request_id: str) -> list[Item]:
    """Return the input as OpenAI's items, each with a type and an id; raises InvalidRequest."""
    if isinstance(request_input, str):
        request_input = [{"role": "user", "content": request_input}]
    return [_item(item, i, request_id) for i, item in enumerate(request_input)]


def _item(item: Item, i: int, request_id: str) -> Item:
    where = f"input.{i}"
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item or "id" not in item else REFERENCE
    name = item.get("id")
    name = name if isinstance(name, str) and name else f"msg_{request_id}_{i}"
    check = _CHECKS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise InvalidRequest(
            f"{where}.type: expected one of {', '.join(_CHECKS)}, found {shorten(kind)}; other "
            "items are not served",
            f"{where}.type",
        )
    return {"id": name, "type": kind, **check(item, where)}


def _as_it_is(item: Item, where: str) -> Item:
    return {name: value for name, value in item.items() if name not in ("id", "type")}


def _reference(item: Item, where: str) -> Item:
    _text(item, "id", where)
    return {}


def _call(item: Item, where: str) -> Item:
    return _as_it_is(item, where) | {
        name: _text(item, name, where) for name in ("call_id", "name", _CALLS[item["type"]])
    }


def _result(item: Item, where: str) -> Item:
    output = item.get("output")
    texts = _texts([output] if isinstance(output, str) else output, "input_text", f"{where}.output")
    return _as_it_is(item, where) | {
        "call_id": _text(item, "call_id", where),
        "output": "\n".join(texts),
    }


def _message(item: Item, where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role: expected user, assistant, system or developer, found {shorten(role)}",
            f"{where}.role",
        )
    part_type = "output_text" if role == "assistant" else "input_text"
    parts = [content] if isinstance(content, str) else content
    texts = _texts(parts, part_type, f"{where}.content")
    return {
        "role": role,
        "status": "completed",
        "content": [
            {
                "type": part_type,
                "text": text,
                **({"annotations": []} if part_type == "output_text" else {}),
            }
            for text in texts
        ],
    }


_CHECKS: dict[str, Callable[[Item, str], Item]] = {
    "message": _message,
    **dict.fromkeys(_CALLS, _call),
    **dict.fromkeys(_RESULTS, _result),
    SEARCH_CALL: _as_it_is,
    REASONING: _as_it_is,
    REFERENCE: _reference,
}


def _text(part: Item, field: str, where: str) -> str:
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{where}.{field}: expected a string, found {shorten(text)}", f"{where}.{field}"
        )
    return text


def _texts(parts: Any, part_type: str, where: str) -> list[str]:
    if not isinstance(parts, list):
        raise InvalidRequest(
            f"{where}: expected a text or a list of parts, found {shorten(parts)}", where
        )
    texts = []
    for j, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": part_type, "text": part}
        kind = part.get("type") if isinstance(part, dict) else part
        field = _PARTS.get(kind) if isinstance(kind, str) else None
        if not isinstance(part, dict) or field is None:
            raise InvalidRequest(
                f"{where}.{j}.type: expected input_text or output_text, found {shorten(kind)}; "
                "only text is served",
                f"{where}.{j}.type",
            )
        texts.append(_text(part, field, f"{where}.{j}"))
    return texts


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of items; tool calls belong to the answer before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type")
        if kind == "message":
            text = "\n".join(part["text"] for part in item["content"])
            messages.append({"role": item["role"], "content": text})
        elif kind in _CALLS:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item[_CALLS[kind]]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in _RESULTS:
            called, text = item["call_id"], item["output"]
            messages.append({"role": "tool", "tool_call_id": called, "content": text})
    return messages
