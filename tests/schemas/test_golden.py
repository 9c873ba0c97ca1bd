"""Bytes that were ever written stay readable, and no schema changes unnoticed."""

import json
from pathlib import Path

import pytest

from schemas.codec import HISTORY_DIR, Codec, schema_fingerprint
from schemas.errors import RecordError
from schemas.records import Heartbeat, Load
from tests.schemas.examples import RECORDS, class_of, example
from tests.schemas.golden import Golden, current_fingerprint, goldens, history_path

OLDER_DIR = Path(__file__).parent / "older"
GOLDENS = goldens()
HOW = "run `make schemas` (see schemas/history/README.md) and commit what it writes"


@pytest.mark.parametrize("name", RECORDS)
def test_current_schema_writes_its_golden_bytes(name: str) -> None:
    matches = [g for g in GOLDENS if (g.name, g.fingerprint) == (name, current_fingerprint(name))]
    assert matches, f"the schema of {name} changed: {HOW}"
    record = example(f"trivium.{name}")
    assert Codec().encode(record) == matches[0].value
    assert Codec().decode(matches[0].value) == record


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g.name}.{g.fingerprint}")
def test_codec_reads_golden_bytes_of_every_version(golden: Golden) -> None:
    assert golden.is_current or history_path(golden).exists(), HOW
    assert schema_fingerprint(golden.schema).hex() == golden.fingerprint
    assert isinstance(Codec().decode(golden.value), class_of(golden.name))


def test_history_versions_have_golden_bytes() -> None:
    for path in HISTORY_DIR.glob("*.avsc"):
        schema = json.loads(path.read_text())
        mark = schema_fingerprint(schema).hex()
        assert path.name == f"{schema['name']}.{mark}.avsc"
        assert any(g.fingerprint == mark for g in GOLDENS), f"{path.name} has no golden bytes"


# Demonstration: a heartbeat from before its load counted requests and tokens. `older/` plays the
# part of schemas/history; the bytes were written by that version.

OLD_BEAT = bytes.fromhex(
    "c301242ae831950554c110776f726b65722d310e0280baedc1d466040210726f757465722d310408"
    "0006020a0000000000004440000000000000000000000000000000000608080a"
)


def test_older_heartbeat_reads_with_defaults() -> None:
    beat = Codec(history=OLDER_DIR).decode(OLD_BEAT)
    assert isinstance(beat, Heartbeat)
    assert beat.member_id == "worker-1" and beat.grants[0].credits == 4
    assert beat.load == Load(
        running=3, waiting=1, queued_tokens=5, tokens_per_s=40.0,
        kv_blocks_used=3, kv_blocks_total=4, kv_bytes_sent=4, kv_bytes_received=5,
    )  # fmt: skip
    assert (beat.load.requests_total, beat.load.tokens_total) == (0, 0)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("Request", "parsing", None),
        ("Work", "parsing", None),
        ("Prompt", "tools", None),
        ("Answer", "tool_calls", None),
        ("TokenFrame", "deltas", ()),
        ("Usage", "reasoning_tokens", 0),
    ],
)
def test_records_from_before_tools_read_as_text(name: str, field: str, value: object) -> None:
    """The last release had no parsed answers; each of its records is one in text."""
    older = [golden for golden in GOLDENS if golden.name == name and not golden.is_current]
    assert older, name
    for golden in older:
        assert field not in [column["name"] for column in golden.schema["fields"]]
        read = getattr(Codec().decode(golden.value), field)
        assert (tuple(read) if isinstance(read, list) else read) == value


def test_codec_rejects_older_heartbeat_without_history() -> None:
    with pytest.raises(RecordError, match="unknown schema fingerprint"):
        Codec().decode(OLD_BEAT)
