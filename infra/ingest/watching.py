"""Follows files: what changed is written again, what was deleted gets a tombstone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from watchfiles import Change, awatch

from infra.ingest.batch import Reading, Refusal
from infra.ingest.files import Source, source_of
from schemas.log.clock import wall_ms

if TYPE_CHECKING:
    from schemas.records import Document

_DEBOUNCE_MS, _STEP_MS = 400, 50


class Changes:
    """What one or more files have come to."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.gone: list[str] = []
        self.refused: list[Refusal] = []


async def changes(
    roots: Sequence[Path], reading: Reading, stop: asyncio.Event
) -> AsyncIterator[Changes]:
    """Until `stop` is set. Files that are written several times in a moment are read once."""
    watched = awatch(
        *roots, stop_event=stop, debounce=_DEBOUNCE_MS, step=_STEP_MS, raise_interrupt=False
    )
    async for found in watched:
        now = Changes()
        for path in sorted({Path(text) for _, text in found}):
            is_gone = (Change.deleted, str(path)) in found and not path.exists()
            source = source_of(path, roots)
            if is_gone:
                now.gone += reading.gone(path)
            elif source is not None and path.is_file():
                await asyncio.to_thread(_read, reading, source, now)
        if now.documents or now.gone or now.refused:
            yield now


def _read(reading: Reading, source: Source, now: Changes) -> None:
    documents, refused = reading.documents(source, wall_ms())
    now.documents += documents
    now.refused += refused
    if not refused:  # else it may be half written: what it held before stays
        now.gone += reading.gone(source.path, [each.document_id for each in documents])
