"""Renders the AsyncAPI document as one self-contained page of HTML: topics, then types.

`asyncapi_page.html.jinja` has the page; this collects what it shows.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment

from schemas.generate.asyncapi import DEAD_LETTER, Json
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX

_TEMPLATE = Path(__file__).with_suffix(".html.jinja")


def asyncapi_page(document: Json) -> str:
    """Return the AsyncAPI document as one HTML page."""
    messages = document["components"]["messages"]
    channels = document["channels"].items()

    def actors(channel: str, action: str) -> list[str]:
        return [
            operation["tags"][0]["name"]
            for operation in document["operations"].values()
            if operation["action"] == action
            and operation["channel"]["$ref"] == f"#/channels/{channel}"
        ]

    headers: dict[str, str] = {}
    for message in messages.values():
        for name, about in message["headers"]["properties"].items():
            headers.setdefault(name, about["description"])
    page = Environment(autoescape=True, keep_trailing_newline=True, trim_blocks=True)
    return page.from_string(_TEMPLATE.read_text()).render(
        document,
        topics={name: item for name, item in channels if DEAD_LETTER not in item["messages"]},
        types=_types(messages.values()),
        headers=headers,
        actors=actors,
        dead_letter=messages[DEAD_LETTER],
        prefix=DEAD_LETTER_HEADERS,
        suffix=DEAD_LETTER_SUFFIX,
    )


def _types(messages: Iterable[Json]) -> dict[str, Json]:
    """Return every named Avro type by its short name; the first definition counts."""
    types: dict[str, Json] = {}

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item)
        elif isinstance(node, dict):
            if node.get("type") in ("record", "enum"):
                types.setdefault(node["name"], node)
            for key in ("type", "items", "values", "fields"):
                walk(node.get(key))

    for message in messages:
        walk(message["payload"].get("schema"))
    return types
