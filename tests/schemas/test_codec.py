"""Framing, round trips, fingerprints and refusals of the codec."""

import dataclasses
import io
import json
import struct
from typing import Any

import avro.io
import avro.schema
import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import Codec, full_schema, schema_fingerprint, schema_of, to_dict
from schemas.encoder import REFUSALS, encoder_of, long_of
from schemas.errors import RecordError
from schemas.records import Cancellation, CancelReason, Load, Role, Sampling, WireError
from tests.schemas.examples import LONG_MAX, RECORDS, example, instances

PLAIN = Codec()
CANCELLATION = Cancellation(
    request_id="r1", session_id="s1", reason=CancelReason.CLIENT_GONE, at_ms=1_700_000_000_000
)
HEADER_BYTES = 10


@given(st.data())
@settings(max_examples=300)
def test_codec_round_trips_every_record(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(RECORDS))
    record = data.draw(instances(f"trivium.{name}"))
    assert PLAIN.decode(PLAIN.encode(record)) == record


def test_codec_decodes_sequences_as_tuples_and_enums_as_members() -> None:
    record = example("trivium.Registration")
    copy = PLAIN.decode(PLAIN.encode(dataclasses.replace(record, roles=[Role.DECODE])))
    assert copy.roles == (Role.DECODE,) and isinstance(copy.roles[0], Role)


def test_to_dict_gives_plain_json() -> None:
    record = dataclasses.replace(example("trivium.Phase"), kv=None)
    plain = to_dict(record)
    assert plain["kv"] is None and plain["error"]["code"] == record.error.code
    assert json.loads(json.dumps(plain)) == plain


# Fingerprints


def test_fingerprint_matches_avro_specification() -> None:
    assert schema_fingerprint("int") == struct.pack("<Q", 0x7275D51A3F395C8F)


@pytest.mark.parametrize("name", RECORDS)
def test_fingerprint_matches_avro_package(name: str) -> None:
    parsed = avro.schema.parse(json.dumps(full_schema(name)))
    assert parsed.fingerprint("CRC-64-AVRO") == schema_fingerprint(full_schema(name))
    assert PLAIN.encode(example(f"trivium.{name}"))[2:HEADER_BYTES] == schema_fingerprint(
        full_schema(name)
    )


@pytest.mark.parametrize("name", RECORDS)
def test_avro_package_reads_encoded_records(name: str) -> None:
    schema = avro.schema.parse(json.dumps(full_schema(name)))
    record = example(f"trivium.{name}")
    body = io.BytesIO(PLAIN.encode(record)[HEADER_BYTES:])
    plain = avro.io.DatumReader(schema).read(avro.io.BinaryDecoder(body))
    assert _lists(plain) == _lists(to_dict(record))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


# Framing


def test_codec_writes_single_object_framing() -> None:
    value = PLAIN.encode(CANCELLATION)
    assert value[:2] == b"\xc3\x01"
    assert value[2:HEADER_BYTES] == schema_fingerprint(full_schema("Cancellation"))


def test_codec_writes_confluent_framing_and_reads_both() -> None:
    registered = Codec({"Cancellation": 258})
    value = registered.encode(CANCELLATION)
    assert value[:5] == b"\x00\x00\x00\x01\x02"
    assert value[5:] == PLAIN.encode(CANCELLATION)[HEADER_BYTES:]
    assert registered.decode(value) == CANCELLATION
    assert registered.decode(PLAIN.encode(CANCELLATION)) == CANCELLATION  # what is still in the log


def test_codec_keeps_single_object_framing_without_schema_id() -> None:
    assert Codec({"Request": 1}).encode(CANCELLATION) == PLAIN.encode(CANCELLATION)


def test_codec_reads_older_registered_version_once_learned() -> None:
    schema = full_schema("WireError")
    schema = {**schema, "fields": [f for f in schema["fields"] if f["name"] != "retriable"]}
    codec = Codec({"WireError": 9})
    value = b"\x00\x00\x00\x00\x08\x04no\x06yes"
    with pytest.raises(RecordError, match="unknown schema id 8"):
        codec.decode(value)
    codec.learn(8, schema)
    assert codec.decode(value) == WireError(code="no", message="yes", retriable=False)


# Refusals

MARK = PLAIN.encode(CANCELLATION)[:HEADER_BYTES]
GARBAGE: list[tuple[str, bytes | None, str]] = [
    ("nothing", None, "expected an Avro record, found an empty value"),
    ("empty", b"", "expected an Avro record, found an empty value"),
    (
        "json",
        b'{"request_id": "r1"}',
        r"expected an Avro framing marker \(c301 or 00\), found 7b22",
    ),
    ("one byte", b"\xc3", r"expected an Avro framing marker .*, found c3"),
    ("short header", MARK[:9], r"expected an Avro framing marker .*, found c301"),
    ("short id", b"\x00\x00\x00", r"expected an Avro framing marker .*, found 0000"),
    ("unknown id", b"\x00\x00\x00\x00\x07rest", "unknown schema id 7"),
    ("unknown mark", b"\xc3\x01" + b"\x11" * 8, "unknown schema fingerprint 1111111111111111"),
    ("no body", MARK, "Cancellation: the body is damaged: EOFError"),
    ("cut body", PLAIN.encode(CANCELLATION)[:-1], "Cancellation: the body is damaged"),
    ("rest", PLAIN.encode(CANCELLATION) + b"ab", "Cancellation: 2 bytes follow the record"),
    ("bad enum", MARK + b"\x02r\x02s\x7e\x00", "Cancellation: the body is damaged: IndexError"),
    ("bad text", MARK + b"\x02\xff\x02s\x00\x00", "the body is damaged: UnicodeDecodeError"),
    ("negative length", MARK + b"\x01" * 8, "Cancellation: the body is damaged"),
    ("huge length", MARK + b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", "the body is damaged"),
]


@pytest.mark.parametrize(
    ("value", "message"), [g[1:] for g in GARBAGE], ids=[g[0] for g in GARBAGE]
)
def test_codec_error_describes_garbage(value: bytes | None, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        PLAIN.decode(value)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_codec_decodes_arbitrary_body_or_raises_record_error(body: bytes) -> None:
    for name in ("Work", "TokenFrame"):
        mark = PLAIN.encode(example(f"trivium.{name}"))[:HEADER_BYTES]
        try:
            PLAIN.decode(mark + body)
        except RecordError:
            pass


MISFITS: list[tuple[str, Any, str]] = [
    ("text for int", Load(running="many"), "Load: a value does not fit its schema"),  # type: ignore[arg-type]
    ("none", WireError(code=None, message=""), "WireError: a value does not fit"),  # type: ignore[arg-type]
    ("int for text", WireError(code=7, message=""), "WireError: a value does not fit"),  # type: ignore[arg-type]
    ("huge", Load(kv_bytes_sent=2**70), "Load: a value does not fit its schema"),
    ("bad union", Sampling(max_tokens=1, seed="x"), "Sampling: a value does not fit"),  # type: ignore[arg-type]
    ("surrogate", WireError(code="\ud800", message=""), "WireError: a value does not fit"),
]


@pytest.mark.parametrize(
    ("record", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS]
)
def test_codec_rejects_values_that_do_not_fit_schema(record: object, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        PLAIN.encode(record)


def test_codec_rejects_objects_that_are_no_records() -> None:
    with pytest.raises(RecordError, match=r"expected a record of schemas/avro, found dict"):
        PLAIN.encode({"request_id": "r1"})


def test_schema_of_returns_full_type_names() -> None:
    assert schema_of("Request")["name"] == "trivium.Request"


# Bodies

ENCODERS = {name: encoder_of(full_schema(name)) for name in RECORDS}


def walked(schema: Any, plain: Any) -> bytes:
    """Return the same body as fastavro writes it."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, plain)
    return out.getvalue()


@given(st.data())
@settings(max_examples=500)
def test_encoder_matches_fastavro_for_random_records(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(RECORDS))
    record = data.draw(instances(f"trivium.{name}"))
    assert ENCODERS[name](record) == walked(schema_of(name), to_dict(record))


@pytest.mark.parametrize("name", RECORDS)
def test_encoder_matches_fastavro_for_every_example_record(name: str) -> None:
    record = example(f"trivium.{name}")
    assert ENCODERS[name](record) == walked(schema_of(name), to_dict(record))


@given(st.integers(-LONG_MAX - 1, LONG_MAX))
@settings(max_examples=300)
def test_long_of_matches_fastavro(value: int) -> None:
    assert long_of(value) == walked({"type": "long"}, value)


@pytest.mark.parametrize("edge", [2**6, 2**13, 2**14, 2**20, 2**62, LONG_MAX])
def test_long_of_matches_fastavro_at_byte_edges(edge: int) -> None:
    for value in (edge - 1, edge, -edge, -edge - 1):
        assert long_of(value) == walked({"type": "long"}, value)


def test_encoder_accepts_numpy_numbers_and_memoryviews() -> None:
    """Engines pass values of such types."""
    frame = dataclasses.replace(
        example("trivium.TokenFrame"), token_ids=np.array([1, 70_000]), at_ms=np.int64(1 << 40)
    )
    plain = dataclasses.replace(frame, token_ids=[1, 70_000], at_ms=1 << 40)
    assert ENCODERS["TokenFrame"](frame) == ENCODERS["TokenFrame"](plain)
    work = example("trivium.Work")
    viewed = dataclasses.replace(work, prompt_tokens=memoryview(work.prompt_tokens))
    assert ENCODERS["Work"](viewed) == ENCODERS["Work"](work)


@pytest.mark.parametrize(
    "value",
    [
        np.uint16(40_000), np.int8(-100), np.int16(-20_000), np.int32(1 << 30), np.uint32(1 << 31),
        np.int64(-LONG_MAX - 1), np.uint64(LONG_MAX), np.float32(3.7), np.float64(20_000.0),
        True, 1.0, 1.5, -1.5, 16_383.5, 20_000.0, 20_000.5, 1.7e12,
    ],
)  # fmt: skip
def test_encoder_matches_fastavro_for_any_number_type(value: Any) -> None:
    """A float in an integer field must not end a process that worked before."""
    work = dataclasses.replace(example("trivium.Work"), attempt=value)
    assert ENCODERS["Work"](work) == walked(schema_of("Work"), to_dict(work))
    frame = dataclasses.replace(example("trivium.TokenFrame"), token_ids=np.array([value]))
    assert ENCODERS["TokenFrame"](frame) == walked(schema_of("TokenFrame"), to_dict(frame))


def test_encoder_accepts_only_unions_of_null_and_one_type() -> None:
    field = {"name": "x", "type": ["long", "null"]}
    with pytest.raises(AssertionError, match=r"expected \[\"null\", one\]"):
        encoder_of({"type": "record", "name": "X", "fields": [field]})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Work", {"prompt_tokens": "text"}),
        ("Work", {"prompt_tokens": None}),
        ("Work", {"attempt": "7"}),
        ("Work", {"attempt": float("nan")}),
        ("Work", {"attempt": float("inf")}),
        ("Work", {"attempt": None}),
        ("Work", {"sampling": "text"}),
        ("Request", {"priority": "no class"}),
        ("Request", {"w_ttft": "heavy"}),
        ("TokenFrame", {"token_ids": None}),
        ("TokenFrame", {"token_ids": 7}),
        ("TokenFrame", {"token_ids": ["text"]}),
        ("TokenFrame", {"token_ids": [LONG_MAX + 1]}),
        ("TokenFrame", {"texts": [None]}),
        ("TokenFrame", {"ends": ["text"]}),
    ],
)
def test_encoder_rejects_values_that_schema_rejects(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(REFUSALS):
        ENCODERS[name](dataclasses.replace(example(f"trivium.{name}"), **changes))
