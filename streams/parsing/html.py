"""HTML and XHTML to text that keeps headings, lists, tables, powers and preformatted text.

Theory of operation. One walk over the tree takes time linear in its nodes. Text is collected until
a block begins or ends, and then becomes a block; its lead shows its kind (`# `, `- `, `3. `). A row
of a table is one line, with ` | ` between its cells, whatever blocks are in them. But if a row has
a table, long code or pages of text, it only serves the layout of the page: its cells are blocks.

Nothing is executed. Parts that only display or navigate a page (scripts, styles, navigation) are
left out.
"""

import html as entities
import re
from collections.abc import Iterable, Iterator
from typing import Any

import lxml.html  # type: ignore[import-untyped]  # ships no types
from lxml import etree
from selectolax.lexbor import LexborHTMLParser

from streams.parsing.charset import decode_text
from streams.parsing.document import ParsedDocument
from streams.parsing.plain import add_fences

NOT_SAID = frozenset(
    "script style noscript template svg nav head iframe object select rt rp annotation".split()
)
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li listing main "
    "menu ol p plaintext pre section summary table tbody td tfoot th thead tr ul xmp".split()
)
_KEPT_AS_IT_IS = frozenset(("pre", "listing", "plaintext", "xmp"))
_ROW_CHARS_MAX, _ROW_LINES_MAX = 2_000, 8  # limits of a row's text, and of code in it
_SPACES = re.compile(r"[^\S\xa0]+")
_HEADING = re.compile(r"h([1-6])")
_LINKS_TO_HEADINGS = ("¶", "#", "§")
# Raised text after a number or letter: its power, or the number of a note, but no ordinal.
_POWER = re.compile(r"[-+−–]?(?:\d[\d.,]*(?:[^\W\d_]|[-+−])?|(?![eoa])[^\W\d_])")
_FORMULA = re.compile(  # has a number or a sign, and no words
    r"(?=.*[\d*/·×⋅=^+−–-])(?=.*\w)(?!.*[^\W\d_]{3})[\w\s.,()*/·×⋅=^+−–-]+", re.DOTALL
)
_RAISED_CHARS_MAX = 40
Block = tuple[str, str]  # its kind (tag or table), and its text
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?([\w:.-]{1,40})""", re.IGNORECASE)
_PROLOG = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w:.-]{1,40})""")
_DECLARED_WITHIN = 4_096  # bytes
_IS_XML = re.compile(r"\A\s*<\?xml\s|<html[^>]{0,1000}\sxmlns\s*=", re.IGNORECASE)
_EMPTY = re.compile(
    r"<(title|script|style|textarea|iframe|noscript|object|select|svg|template)(\s[^<>]{0,2000})?/>",
    re.IGNORECASE,
)
_ENTITY = re.compile(r"&(?!(?:amp|lt|gt|quot|apos);)([A-Za-z][A-Za-z0-9]{1,31});")


def html(data: bytes) -> ParsedDocument:
    """Return the text of a page; its title is that of the page, or the first heading."""
    head = data[:_DECLARED_WITHIN]
    declared = _PROLOG.search(head) or _CHARSET.search(head)
    source = decode_text(data, declared.group(1).decode() if declared else "")
    if _IS_XML.search(source, 0, _DECLARED_WITHIN):
        source = _from_xml(source)
    tree = LexborHTMLParser(source)
    return ParsedDocument(_text(tree), _title(tree))


def html_text(source: str) -> str:
    """Return the text of a piece of HTML."""
    return _text(LexborHTMLParser(source))


def _from_xml(source: str) -> str:
    """Convert XHTML to HTML, as any of its elements may be empty and entities may be HTML's."""
    xml_text = _ENTITY.sub(lambda match: entities.unescape(match.group()), source)
    parser = etree.XMLParser(encoding="utf-8", no_network=True, resolve_entities="internal")
    try:
        root = etree.fromstring(xml_text.encode(errors="replace"), parser)
    except (etree.XMLSyntaxError, ValueError):
        return _EMPTY.sub(r"<\1\2></\1>", source)  # not well-formed: the HTML parser reads it
    lxml.html.xhtml_to_html(root)
    return str(etree.tostring(root, method="html", encoding="unicode"))


def _title(tree: LexborHTMLParser) -> str:
    for place in ("head > title", "h1"):
        node = tree.css_first(place)
        if node is not None and (title := " ".join(node.text().split()).strip(" ¶")):
            return title
    return ""


def _text(tree: LexborHTMLParser) -> str:
    body = tree.body
    writer = _BlockWriter()
    for node, begins in _walk(body) if body is not None else ():
        writer.enter(node) if begins else writer.leave(node)
    writer.flush()
    return join_blocks(writer.blocks)


def row(cells: Iterable[str]) -> str:
    """Return a table's row as a line; empty if its cells are."""
    words = " | ".join(cells).split()
    return " ".join(words) if set(words) - {"|"} else ""


def join_blocks(blocks: Iterable[Block]) -> str:
    """Join blocks with a blank line between them, but not between list items or rows of a table."""
    pieces: list[str] = []
    last = ""
    for kind, words in blocks:
        is_close = kind == last and kind[:2] in ("li", "tr")
        pieces += ["\n" if is_close else "\n\n" if pieces else "", words]
        last = kind
    return "".join(pieces)


def _walk(body: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each node at its begin and at its end, without those that are left out."""
    node, top = body, body.mem_id
    while True:
        is_said = node.tag not in NOT_SAID
        if is_said:
            yield node, True
        child = node.child if is_said else None
        if child is not None:
            node = child
            continue
        while True:
            if node.tag not in NOT_SAID:
                yield node, False
            if node.mem_id == top:
                return
            if (following := node.next) is not None:
                node = following
                break
            node = node.parent


class _BlockWriter:
    """Collects the blocks of a page from its nodes in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._pieces: list[str] = []  # text of the open block
        self._lead, self._tag = "", ""
        self._lists: list[int] = []  # number of the next item; 0 in unnumbered lists
        self._row: list[str] | None = None  # cells, if a row is written as a line
        self._row_node, self._table = 0, 0
        self._kept_depth = 0  # depth of preformatted elements
        self._raised: list[int] = []  # indices in `_pieces` where raised text began
        self._lowered = 0  # index where lowered text began
        self._low_number = (0, 0)  # range in `_pieces` of the last lowered number

    def enter(self, node: Any) -> None:
        """Handle a node's start tag."""
        tag = node.tag
        if tag == "-text":
            text = node.text_content or ""
            if self._low_number[1] == len(self._pieces) > 0 and text[:1].isdecimal():
                self._part()
            self._pieces.append(text if self._kept_depth else _SPACES.sub(" ", text))
        elif tag == "br":
            self._pieces.append("\n" if self._row is None else " ")
        elif tag == "img":
            self._pieces += [" ", node.attributes.get("alt") or "", " "]
        elif tag == "sup":
            self._raised.append(len(self._pieces))
        elif tag == "sub":
            self._lowered = len(self._pieces)
        elif tag in _BLOCKS:
            self._begin(tag, node)

    def _begin(self, tag: str, node: Any) -> None:
        if self._row is not None:
            self._pieces.append(" ")
            if tag in ("td", "th"):
                self._clear()
            return
        self.flush()
        if tag == "tr" and not _lays_out(node):
            self._row, self._row_node = [], node.mem_id
        elif tag == "table":
            self._table += 1
        elif tag in ("ul", "menu", "dir"):
            self._lists.append(0)
        elif tag == "ol":
            self._lists.append(_number(node, "start", 1))
        elif tag == "li":
            self._lead, self._tag = self._bullet(node), "li"
        elif match := _HEADING.fullmatch(tag):
            self._lead = "#" * int(match.group(1)) + " "
        elif tag in _KEPT_AS_IT_IS:
            self._kept_depth += 1

    def _bullet(self, node: Any) -> str:
        number = self._lists[-1] if self._lists else 0
        if not number:
            return "- "
        number = _number(node, "value", number)
        self._lists[-1] = number + 1
        return f"{number}. "

    def leave(self, node: Any) -> None:
        """Handle a node's end tag."""
        tag = node.tag
        if tag == "sup":
            if self._raised:
                self._raise(self._raised.pop())
        elif tag == "sub":
            self._lower(self._lowered)
        elif tag == "a":
            if self._lead[:1] == "#" and "".join(self._pieces[-1:]).strip() in _LINKS_TO_HEADINGS:
                self._pieces.pop()
        elif self._row is not None:
            self._leave_in_row(tag, node)
        elif tag in _BLOCKS:
            self.flush(is_kept=tag in _KEPT_AS_IT_IS)
            if tag in ("ul", "menu", "dir", "ol") and self._lists:
                self._lists.pop()
            elif tag == "li" or _HEADING.fullmatch(tag):
                self._lead, self._tag = "", ""
            elif tag in _KEPT_AS_IT_IS:
                self._kept_depth -= 1

    def _leave_in_row(self, tag: str, node: Any) -> None:
        assert self._row is not None, "asked before"
        if tag in ("td", "th"):
            self._row.append("".join(self._pieces))
            self._clear()
        elif tag == "tr" and node.mem_id == self._row_node:
            if line := row(self._row):
                self.blocks.append((f"tr of {self._table}", line))
            self._row = None
            self._clear()
        elif tag in _BLOCKS:
            self._pieces.append(" ")

    def _raise(self, since: int) -> None:
        raised, before = self._short(since), self._before(since)
        if not (before.isalnum() or before in (")", "]")):
            return
        if _POWER.fullmatch(raised):
            self._pieces[since:] = ["^", raised]
        elif _FORMULA.fullmatch(raised):
            self._pieces[since:] = ["^(", raised, ")"]

    def _lower(self, since: int) -> None:
        if not (lowered := self._short(since)).isdecimal():
            return
        self._pieces[since:] = ["_" if self._before(since).isdecimal() else "", lowered]
        self._low_number = (since, len(self._pieces))

    def _part(self) -> None:
        """Separate a lowered number from the digits that follow it."""
        self._pieces[self._low_number[0]] = "_"
        self._pieces.append(" ")

    def _before(self, since: int) -> str:
        return self._pieces[since - 1][-1:] if since else ""

    def _short(self, since: int) -> str:
        """Return the text since an index; empty if it is long, so that nesting costs little."""
        pieces = self._pieces[since : since + _RAISED_CHARS_MAX + 1]
        if len(pieces) > _RAISED_CHARS_MAX or sum(map(len, pieces)) > _RAISED_CHARS_MAX:
            return ""
        return "".join(pieces).strip()

    def _clear(self) -> None:
        self._pieces.clear()
        self._raised.clear()
        self._lowered, self._low_number = 0, (0, 0)

    def flush(self, *, is_kept: bool = False) -> None:
        """End the open block, and keep it if it has text."""
        text = "".join(self._pieces)
        self._clear()
        if not text.strip():
            return
        if is_kept or self._kept_depth:
            self.blocks.append(("pre", add_fences(text)))
            return
        words = "\n".join(_SPACES.sub(" ", line).strip() for line in text.split("\n")).strip()
        self.blocks.append((self._tag, self._lead + words))
        self._lead = ""


def _number(node: Any, name: str, usual: int) -> int:
    text = (node.attributes.get(name) or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else usual


def _lays_out(row: Any) -> bool:
    """Return whether a row only serves a page's layout."""
    if row.css_first("table") is not None:
        return True
    if any(code.text().strip().count("\n") >= _ROW_LINES_MAX for code in row.css("pre")):
        return True
    blocks = row.css_first("p, div, ul, ol, pre, h1, h2, h3")
    return blocks is not None and len(row.text()) > _ROW_CHARS_MAX
