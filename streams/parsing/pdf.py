"""The text of a PDF, page by page."""

from collections.abc import Iterator

from pypdfium2 import PdfDocument, PdfiumError

from schemas.rules.letters import plain_letters
from streams.parsing.parsed import TEXT_CHARS_MAX, Parsed, Unreadable

PAGES_MAX = 5_000
_DIVIDED = "\x02"  # as PDFium has the hyphen of a word that is divided at the end of its line
_PASSWORD = 4  # of PDFium's errors


def pdf(data: bytes) -> Parsed:
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
    return Parsed(text, title)


def _pages(document: PdfDocument) -> Iterator[str]:
    chars = 0
    for page in document:
        text = page.get_textpage().get_text_bounded()
        page.close()  # with its text
        text = text.replace(_DIVIDED, "").replace("\r\n", "\n").replace("\0", "")
        chars += len(text)
        if chars > TEXT_CHARS_MAX:
            raise Unreadable(f"expected at most {TEXT_CHARS_MAX} characters of text; divide it")
        yield plain_letters(text).strip()
