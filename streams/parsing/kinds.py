"""The kinds of files that can be read, by the suffix of their names, and their parsers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath

from streams.parsing.document import TEXT_CHARS_MAX, ParsedDocument, Unreadable
from streams.parsing.epub import epub
from streams.parsing.html import html
from streams.parsing.mail import mail
from streams.parsing.markdown import markdown
from streams.parsing.office import slides, word_document
from streams.parsing.pdf import pdf
from streams.parsing.plain import code, plain_text
from streams.parsing.records import json_lines, json_text, table

_PLAIN = ".adoc .asciidoc .log .org .rst .tex .text .txt"
_CODE = (
    ".bash .c .cc .cfg .conf .cpp .cs .css .cxx .go .h .hpp .ini .java .js .jsx .kt .lua .mjs .php "
    ".pl .pm .ps1 .py .pyi .r .rb .rs .scala .sh .sql .swift .toml .ts .tsx .yaml .yml .zsh"
)
_READERS: dict[str, Callable[[bytes], ParsedDocument]] = {
    **dict.fromkeys(_PLAIN.split(), plain_text),
    **dict.fromkeys(_CODE.split(), code),
    ".csv": table,
    ".docx": word_document,
    ".eml": mail,
    ".epub": epub,
    ".htm": html,
    ".html": html,
    ".json": json_text,
    ".markdown": markdown,
    ".md": markdown,
    ".pdf": pdf,
    ".pptx": slides,
    ".tsv": table,
    ".xht": html,
    ".xhtml": html,
}
_LINES = (".jsonl", ".ndjson")
KINDS = (*_READERS, *_LINES)


def kind_of(name: str) -> str:
    """Return the suffix of a file's name, which selects its parser; raises Unreadable."""
    kind = PurePosixPath(name).suffix.lower()
    if kind not in KINDS:
        raise Unreadable(
            "unknown kind of file; expected text, Markdown, HTML, PDF, source code, or one that "
            "ends in .csv, .docx, .eml, .epub, .json, .jsonl, .pptx"
        )
    return kind


def parse(kind: str, data: bytes) -> list[ParsedDocument]:
    """Return the documents of a file of that kind, without soft hyphens; raises Unreadable."""
    try:
        documents = list(json_lines(data)) if kind in _LINES else [_READERS[kind](data)]
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # libraries raise all kinds of them for damaged files
        raise Unreadable(f"expected {kind}: {type(error).__name__}: {error}") from error
    if (chars := sum(len(document.text) for document in documents)) > TEXT_CHARS_MAX:
        raise Unreadable(
            f"expected at most {TEXT_CHARS_MAX} characters of text, found {chars}; divide it"
        )
    return [
        replace(
            document,
            text=document.text.replace("\xad", ""),
            title=document.title.replace("\xad", ""),
        )
        for document in documents
    ]
