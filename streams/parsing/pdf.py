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
_DIVIDED = "\x02"  # as PDFium has the hyphen of a word that is divided at the end of its line
_PASSWORD = 4  # of PDFium's errors


def pdf(data: bytes) -> ParsedDocument:
    """Letters of fonts, as ligatures and full-width ones, are those that they stand for. Raises
    Unreadable where it is encrypted, damaged, or has pictures of text only.
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
        page.close()  # with its text
        text = text.replace(_DIVIDED, "").replace("\r\n", "\n").replace("\0", "")
        chars += len(text)
        if chars > TEXT_CHARS_MAX:
            raise Unreadable(f"expected at most {TEXT_CHARS_MAX} characters of text; divide it")
        yield plain_letters(text).strip()


def _page_text(page: Any) -> str:
    """PDFium turns a line from the right letter by letter, those of a ligature too: they have one
    place, and are turned back.
    """
    text = str(page.get_text_bounded())
    if not _FROM_RIGHT.search(text):
        return text
    letters = [chr(raw.FPDFText_GetUnicode(page, at)) for at in range(page.count_chars())]
    if "".join(letters) != text:  # not all of them are on the page
        return text
    at = 0
    for _, same in groupby(range(len(letters)), lambda at: _place(page, letters, at)):
        count = len(list(same))
        letters[at : at + count] = reversed(letters[at : at + count])
        at += count
    return "".join(letters)


def _place(page: Any, letters: list[str], at: int) -> Any:
    """Of a letter that is written from the right; others are apart."""
    return page.get_charbox(at) if unicodedata.bidirectional(letters[at]) in ("R", "AL") else at
