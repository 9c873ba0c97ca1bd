"""Lists the files to ingest, with the ids of their documents.

A document's id is its file's path relative to the named folder, or the file's own name. A line of
JSON has its own id.
"""

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import InvalidRequest
from streams.openai.indexing.reading import FILE_PROCESS, documents_in
from streams.parsing.document import ParsedDocument, Unreadable

FILE_BYTES_MAX = 64 << 20
FILE_MS = 60_000


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file, and the id of its document."""

    path: Path
    name: str


def source_of(path: Path, roots: Iterable[Path]) -> FileSource | None:
    """Return a file below one of the named paths; None for a hidden one, or one elsewhere."""
    for root in roots:
        if path == root:
            return FileSource(path, path.name)
        if path.is_relative_to(root):
            below = path.relative_to(root)
            hidden = any(part.startswith(".") for part in below.parts)
            return None if hidden else FileSource(path, below.as_posix())
    return None


def sources(roots: Iterable[Path]) -> Iterator[FileSource]:
    """Yield all files of these paths, in order of their names, without hidden ones."""
    for root in roots:
        if not root.is_dir():
            yield FileSource(root, root.name)
            continue
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if not name.startswith("."):
                    path = Path(folder) / name
                    yield FileSource(path, path.relative_to(root).as_posix())


async def read(path: Path) -> list[ParsedDocument]:
    """Return the documents of a file; raises Unreadable.

    A separate process reads it, so that a file that takes too long or too much memory ends that
    process and not the call.
    """
    if wrong := await asyncio.to_thread(_unreadable, path):
        raise Unreadable(wrong)
    try:
        reply = await FILE_PROCESS.ask("documents", str(path), path.name, limit_ms=FILE_MS)
    except InvalidRequest as error:
        raise Unreadable(error.message) from error
    return await documents_in(reply)


def _unreadable(path: Path) -> str:
    """Return why a file cannot be read; empty if it can."""
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        return (error.strerror or str(error)).lower()
    is_large = size > FILE_BYTES_MAX
    return f"expected at most {FILE_BYTES_MAX} bytes, found {size}; divide it" if is_large else ""
