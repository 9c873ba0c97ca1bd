"""Plain text, and source code as a code block."""

import re

from streams.parsing.charset import decode_text
from streams.parsing.document import ParsedDocument

_RUN = re.compile(r"`{3,}")
# Declared in the first two lines, as in editors and PEP 263; LaTeX declares it in the preamble.
_COOKIE = re.compile(rb"\A(?:[^\n]{0,500}\n)?[^\n]{0,500}?coding[:=][ \t]*([\w.-]{1,40})")
_INPUTENC = re.compile(rb"\\usepackage\[([\w-]{1,40})\]\{inputenc\}")


def plain_text(data: bytes) -> ParsedDocument:
    """Decode a plain text and leave it unchanged."""
    return ParsedDocument(decode_text(data))


def code(data: bytes) -> ParsedDocument:
    """Return source code between fences, so that it is split between lines and comments are no
    headings."""
    declared = _COOKIE.search(data) or _INPUTENC.search(data, 0, 8_192)
    source = decode_text(data, declared.group(1).decode() if declared else "")
    return ParsedDocument(add_fences(source) if source.strip() else "")


def add_fences(source: str) -> str:
    """Put a source between fences that are longer than any inside."""
    longest = max((len(run) for run in _RUN.findall(source)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{source.strip(chr(10)).rstrip()}\n{fence}"
