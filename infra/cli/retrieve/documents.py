"""Implements `trivium ingest --vectors`: writes documents with vectors to the log."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.cli.retrieve.rows import Rows, VectorRow, open_rows
from infra.terminal.output import print_json

if TYPE_CHECKING:
    from schemas.settings import LogSettings

_UNDER_WAY = 1_000  # documents sent and not acknowledged


def load(
    files: Sequence[Path], collection: str, log: "LogSettings", *, shows: bool, as_json: bool
) -> bool:
    """Write the files' documents to the log; return whether all rows could be used.

    A .npy file has one vector in each row, and the row's number becomes the id. A line of a .jsonl
    file is `{"id": "a", "vector": [0.1, 0.2], "metadata": {"year": 2020}, "text": "..."}`. Raises
    ConfigError for other files.
    """
    opened = [open_rows(file) for file in files]
    count, rows = sum(count for count, _ in opened), chain.from_iterable(part for _, part in opened)
    command = _LoadCommand(log, collection, shows=shows)
    asyncio.run(command.run(count, rows))
    replaced = command.sent_count - len(command.ids)
    report = {"collection": collection, "documents": len(command.ids), "refused": command.refused}
    if as_json:
        print_json(report | {"replaced": replaced})
    elif shows:
        summary = f"documents loaded into collection {collection}: {len(command.ids)}"
        summary += f", replaced by later ones of the file: {replaced}" if replaced else ""
        print(summary + (f", refused {command.refused}" if command.refused else ""))
    return not command.refused


def _check_dimensions(rows: Rows, collection: str, dim: int) -> Rows:
    """Yield the rows, with an error for each whose vector has another dimension."""
    for place, row in rows:
        if isinstance(row, str) or len(row.vector) == (dim := dim or len(row.vector)):
            yield place, row
            continue
        yield (
            place,
            f"document {row.id!r:.80}: expected a vector of {dim} values, as others in collection "
            f"{collection} have, found {len(row.vector)}",
        )


async def _dimension(log: "LogSettings", codec: Any, collection: str) -> int:
    """Return the dimension of a collection's vectors, or 0 where it has none.

    Where no retrieval worker is alive, the last recorded one counts.
    """
    from infra.stack.fleet_watch import FleetWatch
    from schemas.records import MemberKind
    from streams.log.clock import wall_ms

    async with FleetWatch(log, codec) as fleet:
        living = list(fleet.view.living(MemberKind.WORKER, wall_ms()))
    loads = [member.search for member in living if member.search is not None]
    states = [state for load in loads for state in load.collections if state.name == collection]
    dims = [state.dim for state in states if state.documents]
    return dims[0] if dims else 0 if loads else await _recorded_dimension(log, codec, collection)


async def _recorded_dimension(log: "LogSettings", codec: Any, collection: str) -> int:
    from schemas.errors import RecordError
    from schemas.records import CollectionMade
    from streams.log.clients import AssignedReader

    reader, dim = AssignedReader(log, "documents", [0], client_id="trivium-documents"), 0
    async with reader.reading("earliest"):
        for record in await reader.read_to_end():
            if (record.key or b"").startswith(b"/") and record.value:
                with contextlib.suppress(RecordError):
                    creation = codec.decode(record.value)
                    if isinstance(creation, CollectionMade) and creation.collection == collection:
                        dim = creation.dim
    return dim


class _LoadCommand:
    """Runs one call of `trivium ingest --vectors`."""

    def __init__(self, log: "LogSettings", collection: str, *, shows: bool) -> None:
        self.ids: set[str] = set()
        self.sent_count, self.refused = 0, 0
        self._log, self._collection, self._shows = log, collection, shows

    async def run(self, count: int, rows: Rows) -> None:
        """Send the rows that can be used, and report the others."""
        from rich.console import Console
        from rich.progress import Progress

        from streams.log.clients import LogProducer
        from streams.log.registry import make_codec

        codec = await asyncio.to_thread(make_codec, self._log)
        producer = LogProducer(self._log, codec, durable=True, client_id="trivium-documents")
        dim = await _dimension(self._log, codec, self._collection)
        await producer.start()
        try:
            errors = Console(stderr=True)
            hidden = not (self._shows and errors.is_terminal)
            with Progress(console=errors, transient=True, disable=hidden) as progress:
                task = progress.add_task(self._collection, total=count)
                acks: list[Any] = []
                for place, row in _check_dimensions(rows, self._collection, dim):
                    progress.advance(task)
                    if isinstance(row, str):
                        self.refused += 1
                        print(f"{place}: {row}", file=sys.stderr)
                        continue
                    acks.append(await _send(self._log, producer, self._collection, row))
                    self.ids.add(row.id)
                    self.sent_count += 1
                    if len(acks) >= _UNDER_WAY:
                        await asyncio.gather(*acks)
                        acks.clear()
                await asyncio.gather(*acks)
        finally:
            await producer.stop()


async def _send(log: "LogSettings", producer: Any, collection: str, row: VectorRow) -> Any:
    from schemas.records import Document
    from schemas.retrieval import pack_vector
    from streams.log.clock import wall_ms
    from streams.log.documents import send_document

    document = Document(
        document_id=row.id,
        collection=collection,
        vector=pack_vector(row.vector),
        metadata=row.metadata,
        text=row.text,
        at_ms=wall_ms(),
    )
    return await send_document(producer, log, document)
