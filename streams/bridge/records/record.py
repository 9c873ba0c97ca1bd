"""Decodes the value of any producer's record into named fields.

Values are Avro with the writer's schema, JSON or text. First bytes and headers distinguish them:
`content-type` may be `text/plain`, name a charset, or mark a CloudEvent in structured mode, whose
data are then used. Rows are plain, or in the envelope of Connect (`schema` and `payload`), of
Debezium (`before` and `after`), or one in the other. Only `WriterSchemas` does I/O, once per schema
id.
"""

import base64
import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

from schemas.codec import CONFLUENT_MAGIC, SINGLE_OBJECT_MARKER, why_unreadable
from schemas.errors import InvalidRequest, RecordError
from streams.bridge.records import exact_json
from streams.bridge.records.writer_schemas import HEADER, WriterSchemas, decode_body, schema_id_of
from streams.calls.errors import shorten
from streams.calls.request.body import values_of

VALUES_MAX = 65_536  # values of a JSON text; reading one takes microseconds
Fields = dict[str, Any]
_CLOUD_EVENT = "application/cloudevents"
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NO_CHARSETS = frozenset(("idna", "punycode", "raw_unicode_escape", "undefined", "unicode_escape"))
_GONE = "__deleted"  # Debezium's field for rewritten deletes
_OF_DELETES = ("d", "t")  # Debezium's operations without a row after them


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """A record as it is on its topic."""

    topic: str  # with its prefix
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()

    @property
    def size(self) -> int:
        """Return the size of the value in bytes."""
        return len(self.value or b"")

    @property
    def is_empty(self) -> bool:
        """Return whether it deletes: it has no value, or Connect's `null`."""
        if self.value is None:
            return True
        return not self.names_schema and self.value.strip() in (b"", b"null")

    @property
    def names_schema(self) -> bool:
        """Return whether a header names the schema of the value."""
        return any(name == HEADER.format("value") and schema_id for name, schema_id in self.headers)

    @property
    def is_avro(self) -> bool:
        """Return whether it is Avro: by its first bytes, or by a header unless it begins with {."""
        value = self.value or b""
        if self.names_schema:
            return value[:1] != b"{"
        return value[:2] == SINGLE_OBJECT_MARKER or value[:1] == bytes([CONFLUENT_MAGIC])


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of a value by its content type; JSON without one."""

    media: str = "application/json"
    charset: str = ""

    @staticmethod
    def of(content_type: str) -> "_Kind":
        media = content_type.partition(";")[0].strip().lower()
        parsed = Message()
        parsed["content-type"] = content_type
        return _Kind(media or "application/json", parsed.get_content_charset("") or "")

    @property
    def is_text(self) -> bool:
        return self.media == "text/plain"


async def fields_of(record: PromptRecord, schemas: WriterSchemas) -> Fields | None:
    """Return the fields of a value; None for a deleted row. Raises RecordError and InvalidRequest,
    and BrokerUnavailable if the schema registry is unavailable for long.
    """
    value = record.value or b""
    if why := why_unreadable(value):
        raise RecordError(why)
    if record.is_empty:
        return None
    kind = _kind_of(record)
    if kind.is_text:
        return {"text": _decode_text(value, kind)}
    if (schema_ref := schema_id_of(value, record.headers)) is not None:
        schema_id, start = schema_ref
        schema = await schemas.of(schema_id)
        if schema is not None:
            return _row(decode_body(value, start, schema))
        value = value[start:]  # the id is of a JSON schema, so the rest is JSON
    json_value = json_of(value, kind.charset)
    if kind.media.startswith(_CLOUD_EVENT):
        return _data_of(json_value, kind)
    return _row(json_value)


async def fetch_schema(record: PromptRecord, schemas: WriterSchemas) -> None:
    """Fetch the schema that a value names, if it names one. Raises the errors of `fields_of`."""
    if (schema_ref := schema_id_of(record.value or b"", record.headers)) is not None:
        await schemas.of(schema_ref[0])


def _kind_of(record: PromptRecord) -> _Kind:
    for name, value in record.headers:
        if name.lower() == "content-type" and value:
            return _Kind.of(value.decode("latin-1"))
    return _Kind()


def _data_of(event: Any, kind: _Kind) -> Fields | None:
    """Return the data of a CloudEvent in structured mode."""
    if not isinstance(event, dict) or "specversion" not in event:
        raise RecordError(
            f"{kind.media}: expected one event with specversion, found {shorten(event)}"
        )
    data, inner = event.get("data"), _Kind.of(str(event.get("datacontenttype") or ""))
    if (packed := event.get("data_base64")) is not None:
        try:
            raw = base64.b64decode(packed, validate=True)
        except (TypeError, ValueError) as error:
            raise RecordError(f"data_base64: expected base64: {error}") from error
        return (
            {"text": _decode_text(raw, inner)}
            if inner.is_text
            else _row(json_of(raw, inner.charset))
        )
    if inner.is_text and isinstance(data, str):
        return {"text": data}
    return _row(data)


def json_of(value: bytes, charset: str = "") -> Any:
    """Read a JSON value whose numbers keep their digits; raises RecordError and InvalidRequest."""
    text = _decode_text(value, _Kind(charset=charset)).encode()
    if text[:1].strip() not in (b"", b"{"):
        raise RecordError(
            "expected a JSON object, Avro that begins with c301 or with 00 and a schema id, or a "
            f"header content-type: text/plain, found {shorten(value[:40])}"
        )
    if values_of(text, VALUES_MAX) > VALUES_MAX:
        raise InvalidRequest(f"the value: expected at most {VALUES_MAX} values, found more")
    try:
        return exact_json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the value: expected a JSON object: {error}") from error


def _decode_text(value: bytes, kind: _Kind) -> str:
    """Return the text without a byte order mark; the charset is the named one, the mark's, or
    UTF-8."""
    charset = kind.charset or ("utf-16" if value.startswith(_WIDE_MARKS) else "utf-8")
    try:
        if codecs.lookup(charset).name.replace("-", "_") in _NO_CHARSETS:
            raise LookupError(f"unknown encoding: {charset}")
        return value.decode(charset).removeprefix("\ufeff")
    except LookupError as error:
        raise InvalidRequest(f"content-type: charset: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"the value: expected {charset.upper()}: {error}") from error


def _row(row: Any) -> Fields | None:
    """Return the fields of a row without its envelopes; None if it was deleted."""
    row = unwrap_connect(row)
    if isinstance(row, dict) and {"op", "before", "after"} <= row.keys():
        row = _after(row["op"], row["after"])
    if row is None:
        return None
    if not isinstance(row, dict):
        raise RecordError(f"expected a record, found {shorten(row)}")
    if _GONE not in row:
        return row
    return None if row[_GONE] in (True, "true") else {k: row[k] for k in row if k != _GONE}


def _after(operation: Any, row: Any) -> Any:
    if row is None and operation not in _OF_DELETES:
        raise RecordError(
            f"op {shorten(operation)}: expected a row under `after`, found none; have the "
            "connector send whole rows"
        )
    return json_of(row.encode()) if isinstance(row, str) else row  # MongoDB sends JSON texts


def unwrap_connect(value: Any) -> Any:
    """Return the payload of Connect's envelope, or the value if it has none."""
    is_envelope = isinstance(value, dict) and value.keys() == {"schema", "payload"}
    return value["payload"] if is_envelope else value
