"""Items of a call of /v1/responses: checks them, and converts them to messages of a chat.

A chat has messages, tool calls and their results, and the reasoning before these. Searches are
parts of an answer that a client sends back. They are stored with the call, but no prompt has them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.calls.errors import shorten
from streams.openai.responses.custom_input import arguments_of
from streams.openai.responses.tools import function_name

Item = dict[str, Any]
_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
_ROLES = ("user", "assistant", "system", "developer")
REASONING, REFERENCE = "reasoning", "item_reference"
_SEARCHES = ("file_search_call", "web_search_call")  # their results are in no prompt
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # by type: the arguments
_RESULTS = ("function_call_output", "custom_tool_call_output")


def items_of(
    request_input: str | Sequence[Item], request_id: str, field: str = "input"
) -> list[Item]:
    """Return the input as OpenAI's items, each with a type and an id; raises InvalidRequest, which
    names `field`."""
    if isinstance(request_input, str):
        request_input = [{"role": "user", "content": request_input}]
    return [_item(item, i, request_id, f"{field}.{i}") for i, item in enumerate(request_input)]


def _item(item: Item, i: int, request_id: str, where: str) -> Item:
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


def _reasoning(item: Item, where: str) -> Item:
    parts = item.get("content")
    if parts is not None:
        texts = _texts(parts, "reasoning_text", f"{where}.content")
        parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return _as_it_is(item, where) | {"content": parts}


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
    **dict.fromkeys(_SEARCHES, _as_it_is),
    REASONING: _reasoning,
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
    """Return the messages of items; tool calls belong to the answer before them, and reasoning to
    the answer after it."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        kind = item.get("type")
        if kind == REASONING:
            reasoning += "".join(part["text"] for part in item.get("content") or ())
            continue
        is_answer = kind in _CALLS or (kind == "message" and item["role"] == "assistant")
        if is_answer:
            _add_to_answer(messages, item, reasoning)
        elif kind == "message":
            messages.append({"role": item["role"], "content": _content(item)})
        elif kind in _RESULTS:
            called, text = item["call_id"], item["output"]
            messages.append({"role": "tool", "tool_call_id": called, "content": text})
        if is_answer or kind == "message" or kind in _RESULTS:
            reasoning = ""
    return messages


def _content(item: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in item["content"])


def _add_to_answer(messages: list[dict[str, Any]], item: Mapping[str, Any], reasoning: str) -> None:
    """Add a message or a call to the answer that ends the messages, or to a new answer."""
    is_message = item["type"] == "message"
    last = messages[-1] if messages and not reasoning else {}
    if last.get("role") != "assistant" or (is_message and "tool_calls" not in last):
        messages.append(last := {"role": "assistant", "content": ""})
        if reasoning:
            last["reasoning"] = reasoning
    if is_message:
        last["content"] = "\n".join(filter(None, (last["content"], _content(item))))
        return
    arguments = item[_CALLS[item["type"]]]
    if item["type"] == "custom_tool_call":
        arguments = arguments_of(arguments)
    name = function_name(item.get("namespace"), item["name"])
    function = {"name": name, "arguments": arguments}
    call = {"id": item["call_id"], "type": "function", "function": function}
    last.setdefault("tool_calls", []).append(call)


def check_results(items: Sequence[Item], earlier: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest for a result of a call that neither the items before it nor the
    messages of earlier turns have."""
    call_ids = {call.get("id") for message in earlier for call in message.get("tool_calls", ())}
    for i, item in enumerate(items):
        if item["type"] in _CALLS:
            call_ids.add(item["call_id"])
        elif item["type"] in _RESULTS and item["call_id"] not in call_ids:
            raise InvalidRequest(
                f"input.{i}.call_id: expected the id of a tool call in an item before it, found "
                f"{shorten(item['call_id'])}",
                f"input.{i}.call_id",
            )
