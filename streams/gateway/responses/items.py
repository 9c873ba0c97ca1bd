"""Items of a call of /v1/responses: what it brings, and what a chat has of that."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import InvalidRequest
from streams.gateway.http.errors import shown

Item = dict[str, Any]
_PARTS = ("input_text", "output_text", "text")
_KNOWN = ("type", "role", "content", "id", "status", "phase")
_ROLES = ("user", "assistant", "system", "developer")
SEARCH_CALL = "file_search_call"


def items_of(given: str | Sequence[Item], request_id: str) -> list[Item]:
    """The input as items of OpenAI's, each with an id; raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, i, request_id) for i, item in enumerate(given)]


def _item(item: Item, i: int, request_id: str) -> Item:
    where = f"input.{i}"
    kind = item.get("type") or "message"
    name = item.get("id")
    name = name if isinstance(name, str) and name else f"msg_{request_id}_{i}"
    if kind == SEARCH_CALL:  # an answer's own, sent back; what it found stays with the session
        return {**item, "id": name}
    if kind != "message":
        raise InvalidRequest(
            f"{where}.type: expected message, found {shown(kind)}; other items are not served",
            f"{where}.type",
        )
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role: expected user, assistant, system or developer, found {shown(role)}",
            f"{where}.role",
        )
    for field, value in item.items():
        if field not in _KNOWN and value is not None:
            raise InvalidRequest(
                f"{where}.{field}: not supported; leave it out", f"{where}.{field}"
            )
    own = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": own, "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRequest(
            f"{where}.content: expected a text or a list of parts, found {shown(content)}",
            f"{where}.content",
        )
    texts = [_text(part, f"{where}.content.{j}") for j, part in enumerate(parts)]
    return {
        "id": name,
        "type": "message",
        "role": role,
        "status": "completed",
        "content": [
            {"type": own, "text": text, **({"annotations": []} if own == "output_text" else {})}
            for text in texts
        ],
    }


def _text(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        found = part.get("type") if isinstance(part, dict) else part
        raise InvalidRequest(
            f"{where}.type: expected input_text or output_text, found {shown(found)}; only text is "
            "served",
            f"{where}.type",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text: expected a string", f"{where}.text")
    return text


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What a chat has of items."""
    return [
        {"role": item["role"], "content": "\n".join(part["text"] for part in item["content"])}
        for item in items
        if item.get("type") == "message"
    ]
