"""Encodes records to bytes and decodes them: Avro bodies in single-object or Confluent framing.

`schemas/encoder.py` writes bodies, fastavro reads them. Every schema version that was ever
committed can be read: `avro` holds the current ones, `history` the older ones, which are resolved
to the current one.
Calls of a schema registry happen once, at start (`streams/log/registry.py`). A schema is parsed at
its first record: most processes write and read few kinds. Threads may share a codec.
"""

import dataclasses
import enum
import io
import json
import operator
import struct
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from schemas import records
from schemas.encoder import REFUSALS, Encode, encoder_of
from schemas.errors import RecordError
from schemas.rules.sizes import check_bytes

AVRO_DIR = Path(__file__).parent / "avro"
HISTORY_DIR = Path(__file__).parent / "history"
MARKS_FILE = Path(__file__).parent / "marks.json"  # written by `make schemas`
SINGLE_OBJECT_MARKER = b"\xc3\x01"
CONFLUENT_MAGIC = 0
_UNREADABLE = b"\xc3\x00"  # neither Avro nor UTF-8 begins so

Schema = dict[str, Any]


def record_names() -> list[str]:
    """Return the names of all records, sorted."""
    return sorted(path.name.split(".")[1] for path in AVRO_DIR.glob("trivium.*.avsc"))


@cache
def schema_of(name: str) -> Schema:
    """Return the current schema of a record, with every type that it names."""
    return typing.cast(Schema, fastavro.parse_schema(full_schema(name)))


@cache
def full_schema(name: str) -> Schema:
    """Return the schema as plain JSON in which each named type is written out at its first use."""
    return typing.cast(Schema, json.loads(_expanded(name)))


@cache
def _texts() -> Mapping[str, str]:
    """Return all current schemas as of the first call: files may be replaced under a running
    process, which must keep writing the version that it started with."""
    return {path.stem: path.read_text() for path in AVRO_DIR.glob("trivium.*.avsc")}


@cache
def _encoder(name: str) -> Encode:
    return encoder_of(full_schema(name))


def _expanded(name: str) -> str:
    expanded_names: set[str] = set()

    def expand(node: Any) -> Any:
        if isinstance(node, str) and node.startswith("trivium."):
            if node in expanded_names:
                return node
            expanded_names.add(node)
            return expand(json.loads(_texts()[node]))
        if isinstance(node, list):
            return [expand(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = dict(node)
        for key in ("items", "values"):
            if key in node:
                node[key] = expand(node[key])
        if node.get("type") == "record":
            node["fields"] = [{**f, "type": expand(f["type"])} for f in node["fields"]]
        return node

    return json.dumps(expand(f"trivium.{name}"))


def schema_fingerprint(schema: Schema | str) -> bytes:
    """Return CRC-64-AVRO of the parsing canonical form, little-endian as in single-object form."""
    canonical = to_parsing_canonical_form(typing.cast(Any, schema))
    return bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))


@cache
def marks() -> Mapping[str, bytes]:
    """Return each record's fingerprint, from a file: computing them takes longer than the rest of a
    codec's start."""
    hex_marks = json.loads(MARKS_FILE.read_text())
    return {name: bytes.fromhex(mark) for name, mark in hex_marks.items()}


def unreadable_value(why: str) -> bytes:
    """Return the value of a record that stands for an unreadable part of the log."""
    return _UNREADABLE + why.encode()


def why_unreadable(value: bytes | None) -> str:
    """Return the reason in a value of `unreadable_value`; empty for any other value."""
    if value is None or value[:2] != _UNREADABLE:
        return ""
    return value[2:].decode(errors="replace")


# Converters between dataclasses and the values of fastavro. Built once per class.

Convert = Callable[[Any], Any]


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType):
        (inner,) = (arg for arg in hint.__args__ if arg is not type(None))
        return inner, True
    return hint, False


def _maybe(convert: Convert | None, optional: bool) -> Convert | None:
    if convert is None or not optional:
        return convert
    return lambda value: None if value is None else convert(value)


def _writer(hint: Any) -> Convert | None:
    hint, optional = _strip_optional(hint)
    if dataclasses.is_dataclass(hint):
        return _maybe(_to_dict(typing.cast(type, hint)), optional)
    if typing.get_origin(hint) is Sequence:
        item = _writer(typing.get_args(hint)[0])
        return _maybe(
            None if item is None else (lambda values: [item(v) for v in values]), optional
        )
    return None


def _reader(hint: Any) -> Convert | None:
    hint, optional = _strip_optional(hint)
    if dataclasses.is_dataclass(hint):
        return _maybe(_from_dict(typing.cast(type, hint)), optional)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return _maybe(_enum_lookup(hint), optional)
    if typing.get_origin(hint) is Sequence:
        item = _reader(typing.get_args(hint)[0])
        return _maybe(
            tuple if item is None else (lambda values: tuple(map(item, values))), optional
        )
    return None


def _enum_lookup(kind: type[enum.StrEnum]) -> Convert:
    members = {member.value: member for member in kind}
    return members.__getitem__


@cache
def _to_dict(cls: Hashable) -> Convert:
    hints = typing.get_type_hints(cls)
    names = list(hints)
    nested = [(name, write) for name in names if (write := _writer(hints[name]))]
    values_of = operator.attrgetter(*names)

    def convert(record: Any) -> dict[str, Any]:
        values = dict(zip(names, values_of(record), strict=True))
        for name, write in nested:
            values[name] = write(values[name])
        return values

    return convert


@cache
def _from_dict(cls: Any) -> Convert:
    # The slots are set directly: a frozen dataclass's own __init__ takes three times as long, and
    # no record has a __post_init__.
    hints = typing.get_type_hints(cls)
    plan = [(name, getattr(cls, name).__set__, _reader(hints[name])) for name in hints]
    new = object.__new__

    def convert(values: dict[str, Any]) -> Any:
        record = new(cls)
        for name, set_slot, read in plan:
            value = values[name]
            set_slot(record, value if read is None else read(value))
        return record

    return convert


def to_dict(record: Any) -> dict[str, Any]:
    """Return a record as plain dictionaries and lists, for display and for JSON."""
    return typing.cast(dict[str, Any], _to_dict(typing.cast(Hashable, type(record)))(record))


class BoundedBytes:
    """Bytes that fastavro may read at most `reads_max` times: it reads each value at least once,
    and a number once for each of its bytes.
    """

    def __init__(self, value: bytes, start: int, reads_max: int) -> None:
        self._value, self._at, self._reads_left = value, start, reads_max
        self._reads_max = reads_max

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes. Raise RecordError after too many reads."""
        self._reads_left -= 1
        if self._reads_left < 0:
            raise RecordError(
                f"expected fewer values: to read them takes more than {self._reads_max} steps"
            )
        if count < 0:
            raise RecordError(f"expected a length, found {count}")
        at = self._at
        self._at = at + count
        return self._value[at : self._at]

    def tell(self) -> int:
        """Return the current position in bytes."""
        return self._at


Key = typing.TypeVar("Key", bound=Hashable)
Made = typing.TypeVar("Made")


class _LazyDict(dict[Key, Made]):
    """Creates each value at its first use; if that raises, it stores nothing."""

    def __init__(self, make: Callable[[Key], Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> Made:
        self[key] = value = self._make(key)
        return value


class Codec:
    """Encodes and decodes records in one framing.

    `registry_ids` maps record names to Confluent schema ids; without it values are single-object
    encoded. Both framings are always readable, so that a change of the switch loses nothing that
    is still in the log; a Confluent id is readable if it is in `registry_ids` or was added by
    `learn`. `history` is the folder of older schemas.
    """

    def __init__(
        self, registry_ids: Mapping[str, int] | None = None, *, history: Path = HISTORY_DIR
    ) -> None:
        self._parsed = _LazyDict(schema_of)
        self._bodies = _LazyDict(_encoder)
        self._from_plain = _LazyDict[str, Convert](lambda name: _from_dict(getattr(records, name)))
        self._headers = {name: SINGLE_OBJECT_MARKER + mark for name, mark in marks().items()}
        self._names = {mark: name for name, mark in marks().items()}
        self._older = {
            bytes.fromhex(path.suffixes[0][1:]): path.read_text() for path in history.glob("*.avsc")
        }
        _texts()  # read now, before files are replaced
        self._by_fingerprint = _LazyDict(self._version)
        self._by_id: dict[int, tuple[str, Schema]] = {}
        for name, schema_id in (registry_ids or {}).items():
            self._headers[name] = struct.pack(">bI", CONFLUENT_MAGIC, schema_id)
            self._by_id[schema_id] = (name, self._parsed[name])

    def learn(self, schema_id: int, schema: Schema) -> None:
        """Add an older version from the schema registry, so that its records are readable."""
        self._by_id.setdefault(
            schema_id, (schema["name"], typing.cast(Schema, fastavro.parse_schema(schema)))
        )

    def encode(self, record: Any) -> bytes:
        """Return framing header and Avro body. Raise RecordError for values that do not fit."""
        name = type(record).__name__
        header = self._headers.get(name)
        if header is None:
            raise RecordError(f"expected a record of schemas/avro, found {name}")
        try:
            return header + self._bodies[name](record)
        except REFUSALS as error:
            raise RecordError(f"{name}: a value does not fit its schema: {error}") from error

    def decode(self, value: bytes | None, *, reads_max: int = 0) -> Any:
        """Return the record in `value`. Raise RecordError with what was expected and found.

        `reads_max` bounds the reads (`BoundedBytes`), and so the time: for records of unknown
        producers, which may be large.
        """
        if not value:
            raise RecordError("expected an Avro record, found an empty value")
        name, writer, start = self._frame(value)
        check_bytes(name, len(value))
        reader = self._parsed[name]
        body: Any = BoundedBytes(value, start, reads_max) if reads_max else io.BytesIO(value)
        if not reads_max:
            body.seek(start)
        try:
            plain = fastavro.schemaless_reader(body, writer, None if writer is reader else reader)
            record = self._from_plain[name](plain)
        except RecordError:
            raise
        except Exception as error:  # fastavro raises many kinds on damaged bytes
            raise RecordError(
                f"{name}: the body is damaged: {type(error).__name__}: {error}"
            ) from error
        if body.tell() != len(value):
            raise RecordError(f"{name}: {len(value) - body.tell()} bytes follow the record")
        return record

    def _frame(self, value: bytes) -> tuple[str, Schema, int]:
        if value[:2] == SINGLE_OBJECT_MARKER and len(value) >= 10:
            return *self._by_fingerprint[value[2:10]], 10
        if value[0] == CONFLUENT_MAGIC and len(value) >= 5:
            (schema_id,) = struct.unpack_from(">I", value, 1)
            named_schema = self._by_id.get(schema_id)
            if named_schema is None:
                raise RecordError(f"unknown schema id {schema_id}")
            return *named_schema, 5
        raise RecordError(
            why_unreadable(value)
            or f"expected an Avro framing marker (c301 or 00), found {value[:2].hex()}"
        )

    def _version(self, mark: bytes) -> tuple[str, Schema]:
        """Return the record name and the schema of a fingerprint; current versions come first."""
        if (name := self._names.get(mark)) is not None:
            return name, self._parsed[name]
        if (text := self._older.get(mark)) is None:
            raise RecordError(f"unknown schema fingerprint {mark.hex()}")
        old = json.loads(text)
        return old["name"], typing.cast(Schema, fastavro.parse_schema(old))
