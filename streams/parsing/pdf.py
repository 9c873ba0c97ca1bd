"""The text of a PDF, page by page."""

import io
import logging
import re

from pypdf import PdfReader
from pypdf.errors import PyPdfError

from streams.parsing.parsed import Parsed, Unreadable

_HYPHEN = re.compile(r"(?<=[a-zß-ÿ])-\n(?=[a-zß-ÿ])")  # a word divided at the end of its line
PAGES_MAX = 5_000
logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of what it repairs


def pdf(data: bytes) -> Parsed:
    """Raises Unreadable where it is encrypted, damaged, or has pictures of text only."""
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("expected a PDF without a password, found an encrypted one")
        if (count := len(reader.pages)) > PAGES_MAX:
            raise Unreadable(f"expected at most {PAGES_MAX} pages, found {count}; divide it")
        pages = [page.extract_text() for page in reader.pages]
        title = str((reader.metadata and reader.metadata.title) or "").strip()
    except Unreadable:
        raise
    except (PyPdfError, ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise Unreadable(f"expected a PDF: {type(error).__name__}: {error}") from error
    text = "\n\n".join(_HYPHEN.sub("", page).strip() for page in pages if page.strip())
    text = text.replace("\0", "").encode(errors="ignore").decode()
    if not text:
        raise Unreadable(f"expected a PDF with text, found none on {len(pages)} pages: a scan?")
    return Parsed(text, title)
