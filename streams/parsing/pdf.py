"""The text of a PDF, page by page."""

import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pypdfium2 import (  # type: ignore[import-untyped]  # ships no types
    PdfDocument,
    PdfiumError,
    raw,
)

from schemas.rules.letters import plain_letters
from streams.parsing.document import TEXT_CHARS_MAX, ParsedDocument, Unreadable

PAGES_MAX = 5_000
_FROM_RIGHT = re.compile("[\u0590-\u08ff]{2}")
_DIVIDED = "\x02"  # PDFium's character for a hyphen that divides a word at a line's end
_PASSWORD = 4  # PDFium's error code


def pdf(data: bytes) -> ParsedDocument:
    """Return the text of a PDF, with ligatures and full-width letters replaced by plain letters.

    Raises Unreadable if it is encrypted or damaged, or has only pictures of text.
    """
    try:
        document = PdfDocument(data)
    except PdfiumError as error:
        if error.err_code == _PASSWORD:
            raise Unreadable("expected a PDF without a password, found an encrypted one") from None
        raise Unreadable(f"expected a PDF: {error}") from error
    with document:
        if (count := len(document)) > PAGES_MAX:
            raise Unreadable(f"expected at most {PAGES_MAX} pages, found {count}; divide it")
        text = "\n\n".join(page for page in _pages(document) if page)
        title = document.get_metadata_value("Title").strip()
    if not text:
        raise Unreadable(f"expected a PDF with text, found none on {count} pages: a scan?")
    return ParsedDocument(text, title)


def _pages(document: PdfDocument) -> Iterator[str]:
    chars = 0
    for page in document:
        text = _page_text(page.get_textpage())
        page.close()  # also closes its text page
        text = text.replace(_DIVIDED, "").replace("\r\n", "\n").replace("\0", "")
        chars += len(text)
        if chars > TEXT_CHARS_MAX:
            raise Unreadable(f"expected at most {TEXT_CHARS_MAX} characters of text; divide it")
        yield plain_letters(text).strip()


def _page_text(page: Any) -> str:
    """Return a page's text. PDFium reverses right-to-left lines letter by letter, even within a
    ligature: these letters have the same place, and are reversed again."""
    text = str(page.get_text_bounded())
    if not _FROM_RIGHT.search(text):
        return text
    letters = [chr(raw.FPDFText_GetUnicode(page, at)) for at in range(page.count_chars())]
    if "".join(letters) != text:  # some of them are not on the page
        return text
    at = 0
    for _, same in groupby(range(len(letters)), lambda at: _place(page, letters, at)):
        count = len(list(same))
        letters[at : at + count] = reversed(letters[at : at + count])
        at += count
    return "".join(letters)


def _place(page: Any, letters: list[str], at: int) -> Any:
    """Return the box of a right-to-left letter; other letters get different values."""
    return page.get_charbox(at) if unicodedata.bidirectional(letters[at]) in ("R", "AL") else at
