"""Which kinds of files are read, and how each is: by the end of its name."""

from collections.abc import Callable
from pathlib import PurePosixPath

from streams.parsing.html import html
from streams.parsing.markdown import markdown
from streams.parsing.parsed import Parsed, Unreadable
from streams.parsing.pdf import pdf
from streams.parsing.plain import json_lines, plain_text

_READERS: dict[str, Callable[[bytes], Parsed]] = {
    ".txt": plain_text,
    ".text": plain_text,
    ".rst": plain_text,
    ".md": markdown,
    ".markdown": markdown,
    ".html": html,
    ".htm": html,
    ".xhtml": html,
    ".pdf": pdf,
}
_LINES = (".jsonl", ".ndjson")
KINDS = (*_READERS, *_LINES)


def kind_of(name: str) -> str:
    """The end of a file's name that says how it is read; raises Unreadable."""
    kind = PurePosixPath(name).suffix.lower()
    if kind not in KINDS:
        raise Unreadable(f"unknown kind of file; expected one that ends in {', '.join(KINDS)}")
    return kind


def parse(kind: str, data: bytes) -> list[Parsed]:
    """The documents of a file of that kind; raises Unreadable."""
    return list(json_lines(data)) if kind in _LINES else [_READERS[kind](data)]
