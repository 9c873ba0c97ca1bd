"""Reads and writes recordings: what routers applied, as one Avro file that needs no log.

Rows are ordered by incarnations of routers: first the snapshot in parts, then the journal's lines,
each with the record that was applied. Later snapshots, where a replay can also begin, stand before
the line that has their number. After all incarnations come records to compare with (decisions,
outcomes, usage). Values are single-object encoded, and the header has the schema of every kind. The
module knows only the file: `infra/replay/collecting.py` fills it, `replaying.py` reads it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fastavro

from schemas.codec import Codec, full_schema, record_names
from schemas.errors import RecordError

VERSION = 2  # 1: no incarnation had a second snapshot
SNAPSHOT, LINE, RECORD = "snapshot", "line", "record"
_KINDS = {"type": "enum", "name": "Kind", "symbols": [SNAPSHOT, LINE, RECORD]}
_FIELDS: list[tuple[str, Any, str]] = [
    ("kind", _KINDS, "a part of a router's state, a line of its journal, or a record"),
    ("router_id", "string", "of a snapshot or a line: whose"),
    ("router_epoch", "long", "likewise: in which epoch"),
    ("seq", "long", "likewise: the line's number in that epoch"),
    ("topic", "string", "where the record was; of a line about no record, what happened"),
    ("partition", "int", "likewise"),
    ("offset", "long", "likewise"),
    ("now_ms", "long", "of a line: when it was applied; of a record: its timestamp"),
    ("ahead_ms", "long", "of a line about the fleet: the member's clock over the broker's"),
    ("effects", "long", "of a line: the checksum of what followed; 0 where nothing did"),
    ("value", "bytes", "the record, the part of the state, or the id of a request"),
]
_FIELDS_OF_ROW = [{"name": name, "type": kind, "doc": doc} for name, kind, doc in _FIELDS]
_SCHEMA = fastavro.parse_schema(
    {"type": "record", "name": "trivium.recording.Row", "fields": _FIELDS_OF_ROW}
)


class RecordingRow(NamedTuple):
    """One row; fields that its kind does not use are empty."""

    kind: str
    router_id: str = ""
    router_epoch: int = 0
    seq: int = 0
    topic: str = ""
    partition: int = 0
    offset: int = 0
    now_ms: int = 0
    ahead_ms: int = 0
    effects: int = 0
    value: bytes = b""


def write(path: Path, about: Mapping[str, Any], rows: Iterable[RecordingRow]) -> None:
    """Write a recording; if that fails, no file of this name is left."""
    schemas = {name: full_schema(name) for name in record_names()}
    header = {"trivium.recording": {"version": VERSION, **about}, "trivium.schemas": schemas}
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as out:
            fastavro.writer(
                out,
                _SCHEMA,
                (row._asdict() for row in rows),
                codec="deflate",
                metadata={name: json.dumps(value) for name, value in header.items()},
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class Recording:
    """A recording that is being read; `about` has its header."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._reader = reader
        self.about = _about(path, reader.metadata)
        self.codec = Codec()

    def rows(self) -> Iterator[RecordingRow]:
        """Yield all rows in order, once; raises RecordError for a truncated or damaged file."""
        try:
            for row in self._reader:
                yield RecordingRow(**row)
        except (ValueError, EOFError, IndexError, KeyError, OSError) as error:
            raise RecordError(f"{self.path}: cut or damaged: {error}") from error


@contextmanager
def open_recording(path: Path) -> Iterator[Recording]:
    """Open a recording. Raises RecordError for another kind of file or a later version."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        try:
            reader = fastavro.reader(file)
        except (ValueError, EOFError, KeyError) as error:
            raise RecordError(f"{path}: expected a recording, found no Avro file") from error
        yield Recording(path, reader)


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if "trivium.recording" not in metadata:
        raise RecordError(f"{path}: expected a file of `trivium record`, found another Avro file")
    about: dict[str, Any] = json.loads(metadata["trivium.recording"])
    if about["version"] > VERSION:
        raise RecordError(
            f"{path}: version {about['version']} of the format; this installation knows {VERSION}"
        )
    return about
