"""Renders the AsyncAPI document as one self-contained page of HTML: topics, then types."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from schemas.generate.asyncapi import DEAD_LETTER, Json
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1d2430; background: #fff }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccd3dd }
h3 { margin: 2rem 0 .3rem }
p { margin: .3rem 0 }
a { color: #0b5cad; text-decoration: none }
a:hover { text-decoration: underline }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-top: 1px solid #e6eaf0 }
td:first-child, code { font: 13px/1.6 ui-monospace, monospace }
nav { columns: 4; font-size: 14px }
@media (prefers-color-scheme: dark) {
  body { color: #dde3ec; background: #161a20 }
  a { color: #7db4ee }
  h2, th, td { border-color: #333c48 }
}
"""


def asyncapi_page(document: Json) -> str:
    """Return the AsyncAPI document as one HTML page."""
    info, messages = document["info"], document["components"]["messages"]
    channels = {
        name: channel
        for name, channel in document["channels"].items()
        if DEAD_LETTER not in channel["messages"]
    }
    types = _types(messages.values())
    topics = "".join(_topic(name, channel, document) for name, channel in channels.items())
    links = "".join(_link(f"topic-{name}", name) + "<br>" for name in channels)
    records = "".join(_type(name, types[name]) for name in sorted(types))
    title = f"{escape(info['title'])}: topics and records"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"<p>{escape(info['description'])}</p>\n<p>AsyncAPI {escape(document['asyncapi'])}, "
        f"version {escape(info['version'])}.</p>\n<nav>{links}</nav>\n"
        f"<h2>Topics</h2>\n{topics}<h2>Records</h2>\n{records}"
        f"<h2>Dead letters</h2>\n<p>Each topic has one for them, named NAME{DEAD_LETTER_SUFFIX}. "
        f"{escape(messages[DEAD_LETTER]['summary'])}</p>\n"
        f"<h2>Headers</h2>\n{_headers(messages)}</body></html>\n"
    )


def _topic(name: str, channel: Json, document: Json) -> str:
    kafka = channel["bindings"]["kafka"]
    config = kafka["topicConfiguration"]
    rows = [
        ("records", ", ".join(_link(f"type-{record}", record) for record in channel["messages"])),
        ("written by", _actors(document, name, "send")),
        ("read by", _actors(document, name, "receive")),
        ("key", escape(channel.get("x-key", ""))),
        ("partitions", f"{kafka['partitions']}"),
        ("kept", escape(f"{', '.join(config['cleanup.policy'])}; {_hours(config)}")),
    ]
    cells = "".join(f"<tr><td>{label}</td><td>{text}</td></tr>\n" for label, text in rows if text)
    return (
        f'<h3 id="topic-{escape(name)}">{escape(channel["address"])}</h3>\n'
        f"<p>{escape(channel['description'])}</p>\n<table>{cells}</table>\n"
    )


def _hours(config: Json) -> str:
    return f"{config['retention.ms'] / 3_600_000:g} h"


def _actors(document: Json, channel: str, action: str) -> str:
    operations = document["operations"].values()
    here = f"#/channels/{channel}"
    actors = [
        operation["tags"][0]["name"]
        for operation in operations
        if operation["action"] == action and operation["channel"]["$ref"] == here
    ]
    return escape(", ".join(actors))


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


def _type(name: str, schema: Json) -> str:
    head = f'<h3 id="type-{escape(name)}">{escape(name)}</h3>\n'
    head += f"<p>{escape(schema.get('doc', ''))}</p>\n"
    if schema["type"] == "enum":
        return f"{head}<p><code>{escape(', '.join(schema['symbols']))}</code></p>\n"
    return f"{head}<table>{''.join(_fields(schema))}</table>\n"


def _fields(schema: Json) -> Iterator[str]:
    for field in schema["fields"]:
        default = f" = {field['default']!r}" if field.get("default") is not None else ""
        yield (
            f"<tr><td>{escape(field['name'])}</td>"
            f"<td><code>{_hint(field['type'])}{escape(default)}</code></td>"
            f"<td>{escape(field.get('doc', ''))}</td></tr>\n"
        )


def _hint(node: Any) -> str:
    """Return a type in words, with links to named types."""
    if isinstance(node, list):
        return " or ".join(map(_hint, node))
    if isinstance(node, dict):
        if node["type"] in ("array", "map"):
            return f"{node['type']} of {_hint(node.get('items', node.get('values')))}"
        node = node.get("name", node["type"])
    if not isinstance(node, str):
        return _hint(node)
    short = node.rpartition(".")[2]
    return _link(f"type-{short}", short) if short[0].isupper() else escape(short)


def _headers(messages: Json) -> str:
    descriptions: dict[str, str] = {}
    for message in messages.values():
        for name, about in message["headers"]["properties"].items():
            descriptions.setdefault(name, about["description"])
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}"
        f"{' (of dead letters)' * name.startswith(DEAD_LETTER_HEADERS)}</td></tr>\n"
        for name, text in descriptions.items()
    )
    return f"<table>{rows}</table>\n"


def _link(anchor: str, text: str) -> str:
    return f'<a href="#{escape(anchor)}">{escape(text)}</a>'
