"""`trivium documents`: puts documents with ready vectors on the topic that feeds the indexes."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, Quiet, settings_of_running
from infra.cli.retrieve.arrays import read_rows
from infra.terminal.output import print_json
from schemas.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from schemas.rules.metadata import Kinds
    from schemas.settings import LogSettings

app = typer.Typer(help="Load documents with ready vectors.", no_args_is_help=True)
_UNDER_WAY = 1_000  # sent and not acknowledged
EXIT_INCOMPLETE = 1
Row = tuple[str, Any, str]  # id, vector, metadata as JSON
Rows = Iterator[tuple[str, Row | str]]  # each with its place, and what is wrong in place of one


@app.command("load", epilog="Example: trivium documents load books.jsonl --collection books")
def load(
    file: Annotated[Path, typer.Argument(help=".npy or .jsonl.", dir_okay=False)],
    collection: Annotated[str, typer.Option("--collection", "-c", help="Where to.")] = "default",
    config: Config = None,
    bootstrap: Bootstrap = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write the file's documents to the log; retrieval workers find them at once.

    A .npy file holds one vector in each row, and the row's number becomes the id. A line of a
    .jsonl file is `{"id": "a", "vector": [0.1, 0.2], "metadata": {"year": 2020}}`. Documents with
    the same id are replaced. What cannot be used is named, the rest is loaded, and the exit code
    is 1.
    """
    count, rows = _open(file)
    if not 0 < len(collection) <= 128 or "/" in collection:
        raise ConfigError(
            f"--collection: expected 1 to 128 characters without a slash, found {collection!r}"
        )
    log = settings_of_running(config, bootstrap).log
    call = _Call(log, collection, shows=not (quiet or as_json))
    asyncio.run(call.run(count, rows))
    told = {"collection": collection, "documents": len(call.ids), "refused": call.refused}
    if as_json:
        print_json(told | {"replaced": call.sent - len(call.ids)})
    elif not quiet:
        said = f"documents loaded into collection {collection}: {len(call.ids)}"
        if replaced := call.sent - len(call.ids):
            said += f", replaced by later ones of the file: {replaced}"
        print(said + (f", refused {call.refused}" if call.refused else ""))
    if call.refused:
        sys.exit(EXIT_INCOMPLETE)


def _open(file: Path) -> tuple[int, Rows]:
    """How many rows there are, and they; the file is checked as it is read."""
    try:
        if file.suffix == ".npy":
            vectors = read_rows(file)
            return len(vectors), _npy_rows(file, vectors)
        if file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                return sum(1 for line in lines if line.strip()), _json_rows(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    raise ConfigError(f"{file}: expected a file that ends in .npy or .jsonl")


def _npy_rows(file: Path, vectors: Any) -> Rows:
    import numpy as np

    for row, vector in enumerate(vectors):
        wrong = "" if np.isfinite(vector).all() else "expected finite values, found others"
        yield f"{file}, row {row}", wrong or (str(row), vector, "")


def _json_rows(file: Path) -> Rows:
    kinds: Kinds = {}
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found: Row | str = _row(json.loads(line, parse_float=str.encode), kinds)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                found = (
                    "expected an object with an id, a vector of numbers and perhaps metadata: "
                    f"{reason}"
                )
            except InvalidRequest as error:
                found = error.message
            yield f"{file}, line {number}", found


def _row(found: Any, kinds: "Kinds") -> Row:
    """What stands in a line, with its floats as bytes, so that those of metadata keep their digits;
    a vector's are rounded anyway. Raises InvalidRequest, and what Python raises for what is no row.
    """
    import numpy as np

    from schemas.rules.metadata import check_metadata, metadata_of
    from schemas.rules.numbers import float_of

    if not isinstance(found, dict):
        raise TypeError("it is none")
    given, metadata = found["id"], found.get("metadata") or {}
    if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
        raise TypeError("the id is no string nor a whole number")
    name = str(given)
    name.encode()
    if not isinstance(found["vector"], list) or not isinstance(metadata, dict):
        raise TypeError("the vector is no list, or the metadata no object")
    with np.errstate(over="ignore"):
        vector = np.array([float(value) for value in found["vector"]], np.float32)
    if not len(vector) or not np.isfinite(vector).all():
        raise ValueError("the vector is empty, or has values that float32 does not hold")
    facts = json.dumps(metadata, default=lambda digits: float_of(digits.decode()))
    facts, now = facts if metadata else "", dict(kinds)
    check_metadata(metadata_of(facts), now)
    kinds |= now
    return name, vector, facts


def _alike(rows: Rows, collection: str, dim: int) -> Rows:
    """The rows, all of one dimension; workers would bury others, and nobody here hear of it."""
    for place, row in rows:
        if isinstance(row, str) or len(row[1]) == (dim := dim or len(row[1])):
            yield place, row
            continue
        yield (
            place,
            f"document {row[0]!r:.80}: expected a vector of {dim} values, as others in collection "
            f"{collection} have, found {len(row[1])}",
        )


async def _dimension(log: "LogSettings", codec: Any, collection: str) -> int:
    """Of the vectors that a collection holds; 0 where it holds none. Where no retrieval worker is
    seen, what they last wrote down counts.
    """
    from infra.stack.fleet_watch import FleetWatch
    from schemas.log.clock import wall_ms
    from schemas.records import MemberKind

    async with FleetWatch(log, codec) as fleet:
        living = list(fleet.view.living(MemberKind.WORKER, wall_ms()))
    told = [member.search for member in living if member.search is not None]
    held = [each for load in told for each in load.collections if each.name == collection]
    dims = [each.dim for each in held if each.documents]
    return dims[0] if dims else 0 if told else await _written_down(log, codec, collection)


async def _written_down(log: "LogSettings", codec: Any, collection: str) -> int:
    from schemas.errors import RecordError
    from schemas.log.clients import AssignedReader
    from schemas.records import CollectionMade

    reader, dim = AssignedReader(log, "documents", [0], client_id="trivium-documents"), 0
    async with reader.reading("earliest"):
        for record in await reader.read_to_end():
            if (record.key or b"").startswith(b"/") and record.value:
                with contextlib.suppress(RecordError):
                    made = codec.decode(record.value)
                    if isinstance(made, CollectionMade) and made.collection == collection:
                        dim = made.dim
    return dim


class _Call:
    """One call of the command."""

    def __init__(self, log: "LogSettings", collection: str, *, shows: bool) -> None:
        self.ids: set[str] = set()
        self.sent, self.refused = 0, 0
        self._log, self._collection, self._shows = log, collection, shows

    async def run(self, count: int, rows: Rows) -> None:
        """Send what can be used, and name the rest."""
        from rich.console import Console
        from rich.progress import Progress

        from schemas.log.clients import LogProducer
        from schemas.log.registry import make_codec

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
                for place, row in _alike(rows, self._collection, dim):
                    progress.advance(task)
                    if isinstance(row, str):
                        self.refused += 1
                        print(f"{place}: {row}", file=sys.stderr)
                        continue
                    acks.append(await _send(self._log, producer, self._collection, row))
                    self.ids.add(row[0])
                    self.sent += 1
                    if len(acks) >= _UNDER_WAY:
                        await asyncio.gather(*acks)
                        acks.clear()
                await asyncio.gather(*acks)
        finally:
            await producer.stop()


async def _send(log: "LogSettings", producer: Any, collection: str, row: Row) -> Any:
    from schemas.log.clock import wall_ms
    from schemas.log.documents import send_document
    from schemas.records import Document
    from schemas.retrieval import pack_vector

    document_id, vector, metadata = row
    document = Document(
        document_id=document_id,
        collection=collection,
        vector=pack_vector(vector),
        metadata=metadata,
        at_ms=wall_ms(),
    )
    return await send_document(producer, log, document)
