"""Markdown to text that keeps headings, lists, tables and code, but not the addresses of links.

It is rendered to HTML, and then parsed as HTML; so HTML in the source counts, too.
"""

import re
import tomllib
from collections.abc import Mapping, Set
from datetime import date, time
from typing import Any

import yaml  # type: ignore[import-untyped]  # ships no types
from markdown_it import MarkdownIt
from markdown_it.token import Token

from streams.parsing.charset import decode_text
from streams.parsing.document import ParsedDocument
from streams.parsing.html import NOT_SAID, html_text

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_FRONT = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(.*?)^(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE
)
_FRONT_CHARS_MAX = 65_536
_FACTS = ("date", "tags")  # kept besides the title; others are specific to a site
# Tags that, if not closed, would take or drop the rest of the page.
_TAKES_TEXT = frozenset("title textarea xmp noembed noframes plaintext".split())
_SWALLOWS = re.compile(rf"<({'|'.join(sorted(_TAKES_TEXT | NOT_SAID))})\b", re.IGNORECASE)
_NO_VALUES = ("", "~", "null", "Null", "NULL")
_END = re.compile(r"</([A-Za-z]+)")


def markdown(data: bytes) -> ParsedDocument:
    """Return the text of a page. Its title is that of the front matter, or the first of its highest
    headings."""
    source = decode_text(data)
    front, source = _front_matter(source)
    tokens = _PARSER.parse(source)
    closed_tags = set[str]()  # in the HTML blocks that follow
    for token in reversed(tokens):
        if token.type == "html_block":
            closed_tags |= _ends(token.content)
            _tame(token, closed_tags)
        elif token.type == "inline":
            pieces = [piece for piece in token.children or () if piece.type == "html_inline"]
            ends = _ends("".join(piece.content for piece in pieces))
            for piece in pieces:
                _tame(piece, ends)
    headings = [
        (token.tag, _words(tokens[number + 1]))
        for number, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    first = min(headings, key=lambda heading: heading[0])[1] if headings else ""
    title = front.get("title")
    text = html_text(str(_PARSER.renderer.render(tokens, _PARSER.options, {})))
    facts = {name: front[name] for name in _FACTS if front.get(name)}
    return ParsedDocument(
        text, title if isinstance(title, str) and title else first, metadata=facts
    )


def _front_matter(source: str) -> tuple[Mapping[str, Any], str]:
    """Split a source into its front matter, if that is an object in YAML or TOML, and the page."""
    front = _FRONT.match(source[:_FRONT_CHARS_MAX])
    if front is None:
        return {}, source
    mark, text = front.groups()
    try:
        fields: Any = _load(mark, text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}, source
    if not isinstance(fields, dict):
        return {}, source
    plain = {name: _plain(fields.get(name)) for name in ("title", *_FACTS)}
    return plain, source[front.end() :]


def _load(mark: str, text: str) -> Any:
    """Load values as they are written: `1.10` is a version, and `on` may be a word."""
    if mark == "+++":
        return tomllib.loads(text, parse_float=str)
    return yaml.load(text, yaml.BaseLoader)  # this loader makes only texts


def _plain(value: Any) -> Any:
    """Return a text, or a list of texts; None for any other value."""
    return (
        [text for inner in value if (text := _text(inner))]
        if isinstance(value, list)
        else (_text(value))
    )


def _text(value: Any) -> str | None:
    if isinstance(value, date | time):  # `datetime` is a `date`
        return value.isoformat()
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int) or value in _NO_VALUES:
        return None
    return " ".join(str(value).split())


def _ends(source: str) -> set[str]:
    return {name.lower() for name in _END.findall(source)} - {"plaintext"}


def _tame(piece: Token, ends: Set[str]) -> None:
    """Escape tags that are never closed, as GitHub's Markdown does."""

    def escape_unclosed(match: re.Match[str]) -> str:
        return match.group() if match.group(1).lower() in ends else "&lt;" + match.group(1)

    piece.content = _SWALLOWS.sub(escape_unclosed, piece.content)


def _words(token: Token) -> str:
    texts = (child.content for child in token.children or () if not child.type.startswith("html"))
    return " ".join("".join(texts).split())
