"""`trivium documents`: puts documents with ready vectors on the topic that feeds the indexes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, Quiet, settings_of_running
from infra.cli.retrieve.arrays import read_rows
from infra.terminal.output import print_json
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.settings import LogSettings

app = typer.Typer(help="Load documents with ready vectors.", no_args_is_help=True)
_UNDER_WAY = 1_000  # sent and not acknowledged
Row = tuple[str, Any, str]  # id, vector, metadata as JSON


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
    the same id are replaced.
    """
    count, rows = _open(file)
    if not 0 < len(collection) <= 128 or "/" in collection:
        raise ConfigError(
            f"--collection: expected 1 to 128 characters without a slash, found {collection!r}"
        )
    log = settings_of_running(config, bootstrap).log
    asyncio.run(_load(log, collection, count, rows, shows=not (quiet or as_json)))
    if as_json:
        print_json({"collection": collection, "documents": count})
    elif not quiet:
        print(f"documents loaded into collection {collection}: {count}")


def _open(file: Path) -> tuple[int, Iterator[Row]]:
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


def _npy_rows(file: Path, vectors: Any) -> Iterator[Row]:
    import numpy as np

    for row, vector in enumerate(vectors):
        if not np.isfinite(vector).all():
            raise ConfigError(f"{file}: expected finite values, found others in row {row}")
        yield str(row), vector, ""


def _json_rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _row(json.loads(line))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                found = f"{error} is missing" if isinstance(error, KeyError) else error
                raise ConfigError(
                    f"{file}, line {number}: expected an object with an id, a vector of numbers "
                    f"and perhaps metadata: {found}"
                ) from error


def _row(found: Any) -> Row:
    """What stands in a line; raises what Python raises where it does not fit."""
    import numpy as np

    if not isinstance(found, dict):
        raise TypeError("it is none")
    name, metadata = str(found["id"]), found.get("metadata") or {}
    name.encode()
    if not isinstance(found["vector"], list) or not isinstance(metadata, dict):
        raise TypeError("the vector is no list, or the metadata no object")
    with np.errstate(over="ignore"):
        vector = np.array([float(value) for value in found["vector"]], np.float32)
    if not len(vector) or not np.isfinite(vector).all():
        raise ValueError("the vector is empty, or has values that float32 does not hold")
    return name, vector, json.dumps(metadata) if metadata else ""


async def _dimension(log: "LogSettings", codec: Any, collection: str) -> int:
    """Of the vectors that retrieval workers hold in the collection; 0 where they hold none."""
    from infra.stack.fleet_watch import FleetWatch
    from schemas.log.clock import wall_ms
    from schemas.records import MemberKind

    async with FleetWatch(log, codec) as fleet:
        for member in fleet.view.living(MemberKind.WORKER, wall_ms()):
            for held in member.search.collections if member.search else ():
                if held.name == collection and held.documents:
                    return held.dim
    return 0


def _alike(rows: Iterator[Row], collection: str, dim: int) -> Iterator[Row]:
    """The rows, all of one dimension; workers would bury others, and nobody here hear of it."""
    for row in rows:
        dim = dim or len(row[1])
        if len(row[1]) != dim:
            raise ConfigError(
                f"document {row[0]!r}: expected a vector of {dim} values, as others in collection "
                f"{collection} have, found {len(row[1])}"
            )
        yield row


async def _load(
    log: "LogSettings", collection: str, count: int, rows: Iterator[Row], *, shows: bool
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from schemas.log.clients import LogProducer
    from schemas.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, log)
    producer = LogProducer(log, codec, durable=True, client_id="trivium-documents")
    await producer.start()
    sent = 0
    try:
        errors = Console(stderr=True)
        hidden = not (shows and errors.is_terminal)
        with Progress(console=errors, transient=True, disable=hidden) as progress:
            task = progress.add_task(collection, total=count)
            acks: list[Any] = []
            for row in _alike(rows, collection, await _dimension(log, codec, collection)):
                acks.append(await _send(log, producer, collection, row))
                sent += 1
                if len(acks) >= _UNDER_WAY:
                    progress.advance(task, len(await asyncio.gather(*acks)))
                    acks.clear()
            progress.advance(task, len(await asyncio.gather(*acks)))
    except ConfigError as error:
        raise ConfigError(f"{error.message}; documents loaded before it: {sent}") from error
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
