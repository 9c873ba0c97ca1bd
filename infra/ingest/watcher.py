"""Watches files: changed documents are written again, deleted ones get a tombstone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from watchfiles import Change, awatch

from infra.ingest.batch import Refusal, SourceReader
from infra.ingest.files import FileSource, source_of
from streams.log.clock import wall_ms

if TYPE_CHECKING:
    from schemas.records import Document

_DEBOUNCE_MS, _STEP_MS = 400, 50
_Events = set[tuple[Change, str]]


class FileChanges:
    """The new, deleted and refused documents of changed files."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.deleted_ids: list[str] = []
        self.refused: list[Refusal] = []


@asynccontextmanager
async def watch_files(
    roots: Sequence[Path], reader: SourceReader, stop: asyncio.Event
) -> AsyncIterator[AsyncIterator[FileChanges]]:
    """Yield the changes from now on, until `stop` is set.

    A file that is written several times in a moment is read once.
    """
    watched = awatch(
        *roots, stop_event=stop, debounce=_DEBOUNCE_MS, step=_STEP_MS, raise_interrupt=False
    )
    first = asyncio.create_task(_next(watched))
    await asyncio.sleep(0)  # let it subscribe to the system's events
    try:
        yield _changes_of(first, watched, roots, reader)
    finally:
        first.cancel()
        await asyncio.wait([first])
        await watched.aclose()


async def _next(watched: AsyncGenerator[_Events, None]) -> _Events | None:
    return await anext(watched, None)


async def _changes_of(
    first: "asyncio.Task[_Events | None]",
    watched: AsyncGenerator[_Events, None],
    roots: Sequence[Path],
    reader: SourceReader,
) -> AsyncIterator[FileChanges]:
    events = await first
    while events is not None:
        changes = await _read_again(events, roots, reader)
        if changes.documents or changes.deleted_ids or changes.refused:
            yield changes
        events = await _next(watched)


async def _read_again(events: _Events, roots: Sequence[Path], reader: SourceReader) -> FileChanges:
    changes = FileChanges()
    for path in sorted({Path(text) for _, text in events}):
        is_gone = (Change.deleted, str(path)) in events and not path.exists()
        source = source_of(path, roots)
        if is_gone:
            changes.deleted_ids += reader.forget(path)
        elif source is not None and path.is_file():
            await _read(reader, source, changes)
    return changes


async def _read(reader: SourceReader, source: FileSource, changes: FileChanges) -> None:
    documents, refused = await reader.documents(source, wall_ms())
    changes.documents += documents
    changes.refused += refused
    if not refused:  # else it may be half written: its former documents stay
        changes.deleted_ids += reader.forget(
            source.path, [document.document_id for document in documents]
        )
