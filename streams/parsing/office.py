"""Word documents, and slides."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

import mammoth  # type: ignore[import-untyped]  # ships no types
from pptx import Presentation

from streams.parsing.archive import opened
from streams.parsing.html import Block, html, joined, row
from streams.parsing.parsed import Parsed, Unreadable

# How older files begin, and newer ones that have a password.
_COMPOUND = b"\xd0\xcf\x11\xe0"
_GROUPS_DEPTH_MAX = 20


def word_document(data: bytes) -> Parsed:
    """Headings, lists, tables and notes; pictures are left out."""
    _check(data, ".docx")
    with opened(data, "a Word document"):
        made = mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: [])
    return html(f'<meta charset="utf-8">{made.value}'.encode(errors="replace"))


def slides(data: bytes) -> Parsed:
    """Slide after slide: its title as a heading, texts, tables, and what its speaker notes."""
    _check(data, ".pptx")
    with opened(data, "slides"):
        show = Presentation(io.BytesIO(data))
        blocks = [block for slide in show.slides for block in _slide(slide)]
    return Parsed(joined(blocks), str(show.core_properties.title or "").strip())


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
        if getattr(shape, "shapes", None) is not None and depth < _GROUPS_DEPTH_MAX:
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
