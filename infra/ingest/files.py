"""Which files are ingested, under which ids, and how each kind is read.

A document's id is its file's path below the folder that was named, or the file's own name; a line
of JSON brings its own.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.ingest.html import html
from infra.ingest.markdown import markdown
from infra.ingest.parsed import Parsed, Unreadable
from infra.ingest.pdf import pdf
from infra.ingest.plain import json_lines, plain_text

FILE_BYTES_MAX = 64 << 20
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


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and the id of its document."""

    path: Path
    name: str


def source_of(path: Path, roots: Iterable[Path]) -> Source | None:
    """A file below one of the paths that were named; None for one that is hidden or elsewhere."""
    for root in roots:
        if path == root:
            return Source(path, path.name)
        if path.is_relative_to(root):
            below = path.relative_to(root)
            hidden = any(part.startswith(".") for part in below.parts)
            return None if hidden else Source(path, below.as_posix())
    return None


def sources(roots: Iterable[Path]) -> Iterator[Source]:
    """All files of these paths, in order of their names; hidden ones are left out."""
    for root in roots:
        if not root.is_dir():
            yield Source(root, root.name)
            continue
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if not name.startswith("."):
                    path = Path(folder) / name
                    yield Source(path, path.relative_to(root).as_posix())


def read(path: Path) -> list[Parsed]:
    """The documents of a file; raises Unreadable."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise Unreadable(f"unknown kind of file; expected one that ends in {', '.join(KINDS)}")
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise Unreadable(f"expected at most {FILE_BYTES_MAX} bytes, found {size}; divide it")
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable((error.strerror or str(error)).lower()) from error
    return list(json_lines(data)) if kind in _LINES else [_READERS[kind](data)]
