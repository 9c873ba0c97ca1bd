"""Turns of a conversation in Anthropic's form as messages of a chat.

A result of a tool becomes a message of its own, before the text of its turn. Turns of one role
that follow each other become one message, because many templates expect roles to alternate. Hints
in blocks, such as `cache_control`, are ignored.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.anthropic.body import Blocks, MessageTurn
from streams.calls.errors import shorten

Json = dict[str, Any]
# Claude Code puts such a line before its system prompt. It is for the bill, and differs between
# calls, so no prefix of the prompt would be found in a cache.
_BILLING = "x-anthropic-billing-header"
_ERROR, _ERROR_CHARS = "Error: ", 32
_LEFT_OUT = ("redacted_thinking",)  # nobody but its maker can read it
_NOT_SERVED = "not served; only text, tool_use, tool_result and thinking are"


def chat_messages(system: Blocks | None, turns: Sequence[MessageTurn]) -> list[Json]:
    """Return the messages of a chat; raises InvalidRequest for blocks that cannot be read."""
    messages, call_ids = _system(system, "system"), set[str]()
    for i, turn in enumerate(turns):
        where = f"messages.{i}.content"
        if turn.role == "system":
            for message in _system(turn.content, where):
                _append(messages, message)
        elif turn.role == "assistant":
            message = _assistant(turn.content, where)
            call_ids |= {call["id"] for call in message.get("tool_calls", ())}
            _append(messages, message)
        else:
            for message in _user(turn.content, where, call_ids):
                _append(messages, message)
    for message in messages:
        if len(message["content"]) == 1:
            message["content"] = message["content"][0]["text"]
    return messages


def _append(messages: list[Json], message: Json) -> None:
    """Append a message, or join it with the last one if both are of one role."""
    role = message["role"]
    if role == "tool" or not messages or messages[-1]["role"] != role:
        messages.append(message)
        return
    last = messages[-1]
    for field in ("content", "tool_calls"):
        if field in message:
            last.setdefault(field, []).extend(message[field])
    if "reasoning" in message:
        last["reasoning"] = last.get("reasoning", "") + message["reasoning"]


def _system(content: Blocks | None, where: str) -> list[Json]:
    parts = [
        part
        for part in _texts(content or [], where)
        if part["text"] and not part["text"].startswith(_BILLING)
    ]
    return [{"role": "system", "content": parts}] if parts else []


def _assistant(content: Blocks, where: str) -> Json:
    parts, calls, reasoning = list[Json](), list[Json](), list[str]()
    for block, at in _blocks(content, where):
        kind = block["type"]
        if kind == "tool_use":
            calls.append(_call(block, at))
        elif kind == "thinking":
            reasoning.append(_string(block, "thinking", at))
        elif kind not in _LEFT_OUT:
            parts.append(_text(block, at))
    message: Json = {"role": "assistant", "content": parts}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    return message


def _call(block: Json, where: str) -> Json:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.input: expected an object, found {shorten(arguments)}", f"{where}.input"
        )
    call_id, name = (_string(block, field, where, chars_min=1) for field in ("id", "name"))
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _user(content: Blocks, where: str, call_ids: set[str]) -> list[Json]:
    """Return the results of a turn, then its text. `call_ids` are those of the turns before."""
    parts, results = list[Json](), list[Json]()
    for block, at in _blocks(content, where):
        if block["type"] == "tool_result":
            results.append(_result(block, at, call_ids))
        else:
            parts.append(_text(block, at))
    return [*results, {"role": "user", "content": parts}] if parts or not results else results


def _result(block: Json, where: str, call_ids: set[str]) -> Json:
    call_id, field = _string(block, "tool_use_id", where), f"{where}.tool_use_id"
    if call_id not in call_ids:
        raise InvalidRequest(
            f"{field}: expected the id of a tool_use in a turn before, found {shorten(call_id)}",
            field,
        )
    parts = _texts(block.get("content") or [], f"{where}.content")
    if block.get("is_error"):
        text = parts[0]["text"] if parts else ""
        if "error" not in text[:_ERROR_CHARS].lower():  # the model has to see that it failed
            parts = [{"type": "text", "text": _ERROR + text}, *parts[1:]]
    return {"role": "tool", "tool_call_id": call_id, "content": parts}


def _texts(content: Any, where: str) -> list[Json]:
    return [_text(block, at) for block, at in _blocks(content, where)]


def _blocks(content: Any, where: str) -> list[tuple[Json, str]]:
    """Return blocks with their places; text alone is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where}: expected a text or a list of blocks, found {shorten(content)}", where
        )
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(
                f"{where}.{i}: expected a block with a type, found {shorten(block)}", f"{where}.{i}"
            )
    return [(block, f"{where}.{i}") for i, block in enumerate(content)]


def _text(block: Json, where: str) -> Json:
    """Return a block as a part of a chat's message."""
    reader = _READERS.get(block["type"])
    if reader is None:
        raise InvalidRequest(
            f"{where}.type: {shorten(block['type'])} is {_NOT_SERVED}", f"{where}.type"
        )
    return {"type": "text", "text": reader(block, where)}


def _document(block: Json, where: str) -> str:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise InvalidRequest(
            f"{where}.source: expected a document with a source of type text, found "
            f"{shorten(source)}; other documents are not served",
            f"{where}.source",
        )
    text = _string(source, "data", f"{where}.source")
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _string(block: Json, field: str, where: str, *, chars_min: int = 0) -> str:
    text = block.get(field)
    if not isinstance(text, str) or len(text) < chars_min:
        raise InvalidRequest(
            f"{where}.{field}: expected a string, found {shorten(text)}", f"{where}.{field}"
        )
    return text


_READERS: dict[str, Callable[[Json, str], str]] = {
    "text": lambda block, where: _string(block, "text", where),
    "document": _document,
    "tool_reference": lambda block, where: _string(block, "tool_name", where),
}
