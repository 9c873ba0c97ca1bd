"""Markdown to text that keeps its headings, lists, tables and code, without links' addresses."""

import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from streams.parsing.html import html_text
from streams.parsing.parsed import Parsed
from streams.parsing.plain import decoded

_FRONT = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*(?:\n|\Z)", re.DOTALL)
_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.MULTILINE)
_PARSER = MarkdownIt("commonmark").enable("table")


def markdown(data: bytes) -> Parsed:
    """The title is that of the front matter, or the first heading of the highest level there is."""
    source = decoded(data)
    front = _FRONT.match(source)
    named = _TITLE.search(front.group(1)) if front else None
    tokens = _PARSER.parse(source[front.end() :] if front else source)
    headings = [
        (token.tag, _words(tokens[number + 1]))
        for number, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    first = min(headings, key=lambda heading: heading[0])[1] if headings else ""
    title = named.group(1).strip("\"'") if named else first
    return Parsed(_text(tokens), title)


def _text(tokens: Sequence[Token]) -> str:
    blocks: list[str] = []
    lead, row = "", list[str]()
    before = ""
    for token in tokens:
        in_cell, before = before in ("th_open", "td_open"), token.type
        if token.type == "heading_open":
            lead = "#" * int(token.tag[1]) + " "
        elif token.type == "list_item_open":
            lead = f"{token.info}{token.markup} " if token.info else "- "
        elif token.type == "tr_open":
            row = []
        elif token.type == "tr_close":
            blocks.append(" | ".join(row))
        elif token.type in ("fence", "code_block"):
            blocks.append(f"```\n{token.content.rstrip()}\n```")
        elif token.type == "html_block":
            blocks.append(html_text(token.content))
        elif token.type == "inline" and in_cell:
            row.append(_words(token))
        elif token.type == "inline":
            blocks.append(lead + _words(token))
            lead = ""
    return _joined([block for block in blocks if block.strip()])


def _words(token: Token) -> str:
    found = []
    for child in token.children or ():
        if child.type in ("softbreak", "hardbreak"):
            found.append("\n" if child.type == "hardbreak" else " ")
        elif child.type in ("text", "code_inline", "image"):
            found.append(child.content)
    return "".join(found).strip()


def _joined(blocks: Sequence[str]) -> str:
    """A blank line between blocks; none between the items of a list and the rows of a table."""
    found = ""
    for before, block in zip(["", *blocks], blocks, strict=False):
        close = all(re.match(r"(- |\d+[.)] )", each) or " | " in each for each in (before, block))
        found += ("\n" if close else "\n\n") * bool(before) + block
    return found
