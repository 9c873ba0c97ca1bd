"""Markdown to text that keeps its headings, lists, tables and code, without links' addresses.

It is made HTML, and read as such; so what its HTML says counts, too.
"""

import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from typing import Any

import yaml  # type: ignore[import-untyped]  # ships no types
from markdown_it import MarkdownIt
from markdown_it.token import Token

from streams.parsing.charset import decoded
from streams.parsing.html import html_text
from streams.parsing.parsed import Parsed

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_FRONT = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(.*?)^(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE
)
_FRONT_CHARS_MAX = 65_536
_FACTS = ("date", "tags")  # beside the title; others are a site's own
# What would take the rest of the page for its own text, as GitHub's Markdown has it.
_SWALLOWS = re.compile(
    r"<(title|textarea|style|xmp|iframe|noembed|noframes|script|plaintext|svg|select)\b",
    re.IGNORECASE,
)
_END = re.compile(r"</([A-Za-z]+)")


def markdown(data: bytes) -> Parsed:
    """The title is that of the front matter, or the first heading of the highest level there is."""
    source = decoded(data)
    front, source = _front_matter(source)
    tokens = _PARSER.parse(source)
    for token in tokens:
        if token.type in ("inline", "html_block"):
            _tame(token)
    headings = [
        (token.tag, _words(tokens[number + 1]))
        for number, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    first = min(headings, key=lambda heading: heading[0])[1] if headings else ""
    title = front.get("title")
    text = html_text(str(_PARSER.renderer.render(tokens, _PARSER.options, {})))
    facts = {name: front[name] for name in _FACTS if front.get(name)}
    return Parsed(text, title if isinstance(title, str) and title else first, metadata=facts)


def _front_matter(source: str) -> tuple[Mapping[str, Any], str]:
    """What stands before a page, and the page: only where it is an object in YAML or TOML."""
    front = _FRONT.match(source[:_FRONT_CHARS_MAX])
    if front is None:
        return {}, source
    mark, text = front.groups()
    try:
        found: Any = tomllib.loads(text) if mark == "+++" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}, source
    if not isinstance(found, dict):
        return {}, source
    plain = {str(name): _plain(value) for name, value in found.items()}
    return plain, source[front.end() :]


def _plain(value: Any) -> Any:
    """A text, or a list of texts; None for what is neither."""
    if isinstance(value, list):
        return [text for each in value if isinstance(text := _plain(each), str)]
    if isinstance(value, date | time):  # a moment, too
        return value.isoformat()
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else None


def _tame(token: Token) -> None:
    """Have tags that nothing ends in a piece of HTML read as text."""
    ends = {name.lower() for name in _END.findall(token.content)} - {"plaintext"}

    def tamed(found: re.Match[str]) -> str:
        return found.group() if found.group(1).lower() in ends else "&lt;" + found.group(1)

    for piece in token.children or (token,):
        if piece.type in ("html_inline", "html_block"):
            piece.content = _SWALLOWS.sub(tamed, piece.content)


def _words(token: Token) -> str:
    said = (each.content for each in token.children or () if not each.type.startswith("html"))
    return " ".join("".join(said).split())
