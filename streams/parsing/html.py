"""HTML to text that keeps its headings, lists, tables and preformatted text.

Nothing is run, and what a page needs to be shown or moved about in (scripts, styles, navigation) is
left out.
"""

import re
from collections.abc import Iterator
from typing import Any

from selectolax.lexbor import LexborHTMLParser

from streams.parsing.parsed import Parsed
from streams.parsing.plain import decoded

_NOT_SAID = "script, style, noscript, template, svg, nav, head, iframe, object, button, select"
_BLOCKS = set(
    "address article aside blockquote body dd details div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header hr html li main ol p pre section summary table tbody thead "
    "tfoot tr ul caption".split()
)
_SPACES = re.compile(r"[^\S\xa0]+")
_HEADING = re.compile(r"h([1-6])")


def html(data: bytes) -> Parsed:
    """The title is that of the page, or its first heading."""
    tree = LexborHTMLParser(decoded(data))
    named = tree.css_first("title") or tree.css_first("h1")
    title = _SPACES.sub(" ", named.text()).strip() if named is not None else ""
    return Parsed(_text(tree), title)


def html_text(source: str) -> str:
    """Of a piece of HTML."""
    return _text(LexborHTMLParser(source))


def _text(tree: LexborHTMLParser) -> str:
    for node in tree.css(_NOT_SAID):
        node.decompose()
    blocks = [(tag, words) for tag, words in _blocks(tree.body)]
    found = ""
    for number, (tag, words) in enumerate(blocks):
        close = number and tag in ("li", "tr") and blocks[number - 1][0] == tag
        found += ("\n" if close else "\n\n") * bool(number) + words
    return found


def _blocks(body: Any) -> Iterator[tuple[str, str]]:
    """Tag and words of each block that says something, in order."""
    owner: Any = None
    owners: dict[int, Any] = {}
    said = ""
    for node in () if body is None else body.traverse(include_text=True):
        if node.tag in ("td", "th") and said.strip() and owner is not None:
            if _owner(node, owners).mem_id == owner.mem_id:
                said += " | "
        if node.tag == "br":
            said += "\n"
        if node.tag != "-text":
            continue
        mine = _owner(node, owners)
        if owner is None or mine.mem_id != owner.mem_id:
            if words := _said(owner, said):
                yield owner.tag, words
            owner, said = mine, ""
        text = node.text_content or ""
        said += text if mine.tag == "pre" else _SPACES.sub(" ", text)
    if words := _said(owner, said):
        yield owner.tag, words


def _owner(node: Any, owners: dict[int, Any]) -> Any:
    """The nearest block that a node is in; `owners` are those that are known, by their nodes: pages
    nest thousands deep."""
    climbed: list[int] = []
    while node.parent is not None and node.tag not in _BLOCKS and node.mem_id not in owners:
        climbed.append(node.mem_id)
        node = node.parent
    mine = owners.get(node.mem_id, node)
    owners.update(dict.fromkeys(climbed, mine))
    return mine


def _said(owner: Any, said: str) -> str:
    if owner is None or not said.strip():
        return ""
    if owner.tag == "pre":
        return "```\n" + said.strip("\n") + "\n```"
    words = "\n".join(_SPACES.sub(" ", line).strip() for line in said.split("\n")).strip()
    if found := _HEADING.fullmatch(owner.tag):
        return "#" * int(found.group(1)) + " " + words
    return "- " + words if owner.tag == "li" else words
