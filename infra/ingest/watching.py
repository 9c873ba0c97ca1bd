"""Follows files: what changed is written again, what was deleted gets a tombstone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from watchfiles import Change, awatch

from infra.ingest.batch import Reading, Refusal
from infra.ingest.files import Source, source_of
from schemas.log.clock import wall_ms

if TYPE_CHECKING:
    from schemas.records import Document

_DEBOUNCE_MS, _STEP_MS = 400, 50
_Found = set[tuple[Change, str]]


class Changes:
    """What one or more files have come to."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.gone: list[str] = []
        self.refused: list[Refusal] = []


@asynccontextmanager
async def watching(
    roots: Sequence[Path], reading: Reading, stop: asyncio.Event
) -> AsyncIterator[AsyncIterator[Changes]]:
    """Gives what changes from now on, until `stop` is set. Files that are written several times in
    a moment are read once.
    """
    watched = awatch(
        *roots, stop_event=stop, debounce=_DEBOUNCE_MS, step=_STEP_MS, raise_interrupt=False
    )
    first = asyncio.create_task(_next(watched))
    await asyncio.sleep(0)  # when it waits, the system tells it of what changes
    try:
        yield _changes(first, watched, roots, reading)
    finally:
        first.cancel()
        await asyncio.wait([first])
        await watched.aclose()


async def _next(watched: AsyncGenerator[_Found, None]) -> _Found | None:
    return await anext(watched, None)


async def _changes(
    first: "asyncio.Task[_Found | None]",
    watched: AsyncGenerator[_Found, None],
    roots: Sequence[Path],
    reading: Reading,
) -> AsyncIterator[Changes]:
    found = await first
    while found is not None:
        now = await _read_again(found, roots, reading)
        if now.documents or now.gone or now.refused:
            yield now
        found = await _next(watched)


async def _read_again(found: _Found, roots: Sequence[Path], reading: Reading) -> Changes:
    now = Changes()
    for path in sorted({Path(text) for _, text in found}):
        is_gone = (Change.deleted, str(path)) in found and not path.exists()
        source = source_of(path, roots)
        if is_gone:
            now.gone += reading.gone(path)
        elif source is not None and path.is_file():
            await _read(reading, source, now)
    return now


async def _read(reading: Reading, source: Source, now: Changes) -> None:
    documents, refused = await reading.documents(source, wall_ms())
    now.documents += documents
    now.refused += refused
    if not refused:  # else it may be half written: what it held before stays
        now.gone += reading.gone(source.path, [each.document_id for each in documents])
