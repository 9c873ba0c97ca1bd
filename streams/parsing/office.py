"""Word documents and slides to text."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any
from zipfile import ZipFile

import mammoth  # type: ignore[import-untyped]  # ships no types
from lxml import etree  # type: ignore[import-untyped]  # the same
from pptx import Presentation

from streams.parsing.archive import open_archive
from streams.parsing.document import ParsedDocument, Unreadable
from streams.parsing.html import Block, html, join_blocks, row

# Older files begin with these bytes, and so do newer ones with a password.
_COMPOUND = b"\xd0\xcf\x11\xe0"
_DEPTH_MAX = 20  # of nested shapes, and of an equation's parts
_DOCUMENT = "word/document.xml"
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_PASSED_OVER = re.compile(rb":(?:fldSimple|bdo|dir|ruby|oMath)\b")
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"


def word_document(data: bytes) -> ParsedDocument:
    """Return headings, lists, tables and notes as text; pictures are left out."""
    _check(data, ".docx")
    with open_archive(data, "a Word document") as archive:
        file = io.BytesIO(data) if _DOCUMENT not in archive.namelist() else _spell_out(archive)
        result = mammoth.convert_to_html(file, convert_image=lambda image: [])
    page = result.value.replace("<ol>", "<ul>").replace("</ol>", "</ul>")  # items have no numbers
    return html(f'<meta charset="utf-8">{page}'.encode(errors="replace"))


def _spell_out(archive: ZipFile) -> io.BytesIO:
    """Write fields, equations and ruby text of a document as plain text, as mammoth skips them."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as packed:
        for name in archive.namelist():
            if name.endswith((".xml", ".rels")):  # other members are pictures
                part = archive.read(name)
                packed.writestr(name, _plain(part) if name == _DOCUMENT else part)
    return buffer


def _plain(part: bytes) -> bytes:
    if not _PASSED_OVER.search(part):
        return part
    parser = etree.XMLParser(no_network=True, resolve_entities="internal")
    root = etree.fromstring(part, parser)
    for wrapper in root.iter(*(_WORD + name for name in ("fldSimple", "bdo", "dir"))):
        wrapper.tag = f"{_WORD}smartTag"  # mammoth reads the content of these
    for ruby in list(root.iter(f"{_WORD}ruby")):
        base = etree.Element(f"{_WORD}t")
        base.text = "".join(ruby.xpath("*[local-name()='rubyBase']//text()"))
        ruby.getparent().replace(ruby, base)
    for equation in list(root.iter(f"{_MATH}oMath")):
        run = etree.Element(f"{_WORD}r")
        etree.SubElement(run, f"{_WORD}t").text = _equation(equation, 0)
        outer = equation.getparent()
        (outer if outer.tag == f"{_MATH}oMathPara" else equation).addprevious(run)
        outer.remove(equation)
    return bytes(etree.tostring(root))


def _equation(part: Any, depth: int) -> str:
    """Return an equation as typed text: `x^2`, `(a + b)/2`."""
    if part.tag == f"{_MATH}t":
        return part.text or ""
    if depth > _DEPTH_MAX or not isinstance(part.tag, str):
        return ""
    kind = part.tag.removeprefix(_MATH)
    terms = [_equation(inner, depth + 1) for inner in part]
    sign = {"sup": "^", "sub": "_", "den": "/", "rad": "√"}.get(kind, "")
    text = "".join(terms)
    if kind in ("num", "den", "rad", "sup", "sub") and len(text) > 1 and not text.isalnum():
        text = f"({text})"
    return f"({text})" if kind == "d" else sign + text


def slides(data: bytes) -> ParsedDocument:
    """Return the slides in order, with titles as headings, texts, tables and speaker notes."""
    _check(data, ".pptx")
    with open_archive(data, "slides"):
        show = Presentation(io.BytesIO(data))
        blocks = [block for slide in show.slides for block in _slide(slide)]
    return ParsedDocument(join_blocks(blocks), str(show.core_properties.title or "").strip())


def _check(data: bytes, kind: str) -> None:
    if data.startswith(_COMPOUND):
        raise Unreadable(f"expected a {kind}, found an older form, or a file with a password")


def _slide(slide: Any) -> Iterator[Block]:
    title = slide.shapes.title
    yield from _shapes(slide.shapes, title.shape_id if title is not None else None, 0)
    if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None:
        yield from _paragraphs(notes, "")


def _shapes(shapes: Iterable[Any], title_id: int | None, depth: int) -> Iterator[Block]:
    for shape in shapes:
        if getattr(shape, "shapes", None) is not None and depth < _DEPTH_MAX:
            yield from _shapes(shape.shapes, title_id, depth + 1)
        elif getattr(shape, "has_table", False):
            for cells in shape.table.rows:
                if line := row([cell.text_frame.text for cell in cells.cells]):
                    yield "tr", line
        elif getattr(shape, "has_text_frame", False):
            yield from _paragraphs(shape.text_frame, "# " if shape.shape_id == title_id else "")


def _paragraphs(frame: Any, lead: str) -> Iterator[Block]:
    for paragraph in frame.paragraphs:
        if words := " ".join(paragraph.text.split()):
            yield "", lead + words
