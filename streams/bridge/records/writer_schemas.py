"""Writers' Avro schemas, by their id in the schema registry.

Each is fetched once, in a thread, and kept; an unknown id is remembered for a minute. While the
registry is unavailable, readers wait, and further records stay in Kafka. Users of the registry can
register any schema. A recursive one would crash this process with a record of a few megabytes,
because fastavro recurses in C. One with values of no bytes would keep it busy for ever with a
record of ten bytes. Both are refused, and so is a record of more values than a prompt may have.
"""

import asyncio
import logging
import struct
from collections.abc import Iterable
from typing import Any, cast
from uuid import UUID

import fastavro

from schemas.codec import CONFLUENT_MAGIC, BoundedBytes, Schema
from schemas.errors import BrokerUnavailable, ConfigError, RecordError
from streams.log.reading.faults import FAULTS
from streams.log.registry import NotRegistered, Registry, SchemaId
from streams.log.retry import Backoff

logger = logging.getLogger(__name__)
KNOWN_MAX = 1_024
READS_MAX = 4 * 65_536  # reads of one record: about 0.1 s, which blocks everything else
HEADER = "__{}_schema_id"  # Confluent's header with the id of a key or value
_ID, _GUID = (CONFLUENT_MAGIC, 5), (1, 17)  # first byte, and total length in bytes
_DIGITS = "trivium-digits"
_FLOAT = struct.Struct("f")
UNKNOWN_S = 60.0
AWAY_S = 600.0  # how long a registry may be unavailable before its prompts fail
_SUBJECT = "schema registry"  # its name in heartbeats that report a failure
_PRIMITIVES = frozenset(
    ("null", "boolean", "int", "long", "float", "double", "bytes", "string"),
)


class WriterSchemas:
    """The schemas of one registry, shared by all readers."""

    def __init__(self, url: str, timeout_ms: int) -> None:
        """Create one; `url` is `log.schema_registry`, empty for none."""
        self._registry = Registry(url, timeout_ms=timeout_ms) if url else None
        self._schemas: dict[SchemaId, Schema | None] = {}
        self._refusals: dict[SchemaId, tuple[float, str]] = {}  # end time in s, and the reason
        self._turn = asyncio.Lock()

    async def of(self, schema_id: SchemaId) -> Schema | None:
        """Return the Avro schema of an id; None if it is a JSON schema. Raises RecordError for an
        unknown id or an unreadable schema, and BrokerUnavailable if the registry is unavailable for
        long.
        """
        if schema_id not in self._schemas:
            async with self._turn:
                if schema_id not in self._schemas:
                    _remember(self._schemas, schema_id, await self._fetch_with_retry(schema_id))
        return self._schemas[schema_id]

    async def _fetch_with_retry(self, schema_id: SchemaId) -> Schema | None:
        pauses, time_s = Backoff(), asyncio.get_running_loop().time
        until_s = time_s() + AWAY_S
        while True:
            try:
                schema = await self._fetch(schema_id)
            except BrokerUnavailable as error:
                FAULTS.note_failing(_SUBJECT, error.message)
                if time_s() >= until_s:
                    raise
                logger.warning("prompts wait for the schema registry: %s", error)
            else:
                FAULTS.note_working(_SUBJECT)
                return schema
            await asyncio.sleep(pauses.after(0))

    async def _fetch(self, schema_id: SchemaId) -> Schema | None:
        if self._registry is None:
            raise RecordError(
                f"schema id {schema_id}: no schema registry is named (log.schema_registry)"
            )
        now_s = asyncio.get_running_loop().time()
        until_s, why = self._refusals.get(schema_id, (0.0, ""))
        if now_s < until_s:
            raise RecordError(why)
        try:
            schema = await asyncio.to_thread(self._registry.fetch, schema_id)
            return None if schema is None else readable(schema)
        except (NotRegistered, RecordError) as error:
            _remember(self._refusals, schema_id, (now_s + UNKNOWN_S, error.message))
            raise RecordError(error.message) from error
        except ConfigError as error:  # a refusal that may be temporary, such as of a password
            raise BrokerUnavailable(error.message) from error


def _remember(table: dict[SchemaId, Any], schema_id: SchemaId, value: Any) -> None:
    table[schema_id] = value
    if len(table) > KNOWN_MAX:
        del table[next(iter(table))]


def schema_id_of(
    value: bytes, headers: Iterable[tuple[str, bytes]], part: str = "value"
) -> tuple[SchemaId, int] | None:
    """Return the schema id of a value or key, and the offset of its body; None if it has no id.

    Raises RecordError for a malformed id.
    """
    framed, start = dict(headers).get(HEADER.format(part)), 0
    if not framed:
        if value[:1] != bytes([CONFLUENT_MAGIC]):
            return None
        framed, start = value[:5], 5
    kind = (next(iter(framed), None), len(framed))
    if kind not in (_ID, _GUID):
        raise RecordError(
            f"expected a schema id and a record, found {len(value)} bytes and the id {framed.hex()}"
        )
    return (int.from_bytes(framed[1:]) if kind == _ID else UUID(bytes=framed[1:])), start


def readable(schema: Any) -> Schema:
    """Return a schema parsed for reading; raises RecordError if it is invalid or refused."""
    try:
        parsed = cast(Schema, fastavro.parse_schema(_with_digits(schema)))
        _can_be_empty(parsed, {})
    except RecordError:
        raise
    except Exception as error:  # fastavro raises many kinds
        raise RecordError(
            f"the writer's schema cannot be read: {type(error).__name__}: {error}"
        ) from error
    return parsed


def _with_digits(node: Any) -> Any:
    """Return the schema with 32-bit floats marked: 0.1 must not become 0.10000000149011612."""
    if node == "float":
        return {"type": "float", "logicalType": _DIGITS}
    if isinstance(node, list):
        return [_with_digits(branch) for branch in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "float":
        return {**node, "logicalType": _DIGITS}
    inner = {name: _with_digits(node[name]) for name in ("type", "items", "values") if name in node}
    if "fields" in node:
        inner["fields"] = [
            {**field, "type": _with_digits(field["type"])} for field in node["fields"]
        ]
    return {**node, **inner}


def _shortest(number: float, *_: object) -> float:
    """Return the 64-bit float with the fewest digits that equals this one in 32 bits."""
    for digits in range(1, 9):
        shorter = float(f"{number:.{digits}g}")
        if _FLOAT.unpack(_FLOAT.pack(shorter))[0] == number:
            return shorter
    return float(f"{number:.9g}")


fastavro.read.LOGICAL_READERS[f"float-{_DIGITS}"] = _shortest


def _can_be_empty(node: Any, named_types: dict[str, bool]) -> bool:
    """Return whether a value may have no bytes; `named_types` are the types already checked."""
    if isinstance(node, str):
        if node in _PRIMITIVES:
            return node == "null"
        if node not in named_types:
            raise RecordError(f"the writer's schema nests {node} in itself, which is not read")
        return named_types[node]
    if isinstance(node, list):
        for branch in node:
            _can_be_empty(branch, named_types)
        return False
    match kind := node["type"]:
        case "record" | "error":
            if any(_can_be_empty(field["type"], named_types) for field in node["fields"]):
                raise RecordError("the writer's schema has a field of nothing, which is not read")
            return named_types.setdefault(node["name"], not node["fields"])
        case "enum" | "fixed":
            return named_types.setdefault(node["name"], node.get("size") == 0)
        case "array":
            if _can_be_empty(node["items"], named_types):
                raise RecordError("the writer's schema has a list of nothing, which is not read")
            return False
        case "map":
            _can_be_empty(node["values"], named_types)
            return False
    return _can_be_empty(kind, named_types)


def decode_body(value: bytes, start: int, schema: Schema) -> Any:
    """Decode the bytes from `start` on. Raises RecordError."""
    body: Any = BoundedBytes(value, start, READS_MAX)
    try:
        record = fastavro.schemaless_reader(body, schema, None)
    except RecordError:
        raise
    except Exception as error:  # fastavro raises many kinds on damaged bytes
        raise RecordError(f"the body is damaged: {type(error).__name__}: {error}") from error
    if extra_bytes := len(value) - body.tell():
        raise RecordError(f"{extra_bytes} bytes follow the record")
    return record
