"""Which format a file has, and what becomes of files that have none."""

import gzip
import json
import os
from pathlib import Path

import pytest

from infra.traces.formats import read, write
from infra.traces.prompts import body
from infra.traces.trace import with_request_ids
from schemas.errors import ConfigError
from tests.infra.traces.samples import AZURE, MOONCAKE, SESSIONS, written


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", "a,b,c\n1,2,3\n", '{"a": 1}\n', "[1]\n", "{\n}\n", "null\n", '{"event": 3}\n'],
)
def test_format_error_lists_supported_formats(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.txt:1: expected a trace: Azure's CSV"):
        read(path)


def test_trace_reader_refuses_binary_and_truncated_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe" + os.urandom(64))
    (tmp_path / "a.gz").write_bytes(b"plain")
    (tmp_path / "b.gz").write_bytes(gzip.compress(AZURE.encode() * 99)[:-20])
    for name in ("a.csv", "a.gz", "b.gz"):
        with pytest.raises(ConfigError, match=f"{name}: expected text as UTF-8, or gzip"):
            read(tmp_path / name)


def test_trace_reader_refuses_file_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE.splitlines()[0])
    with pytest.raises(ConfigError, match="expected requests, found none"):
        read(path)


def test_trace_writer_refuses_unknown_format(tmp_path: Path) -> None:
    trace = read(written(tmp_path, MOONCAKE))
    with pytest.raises(ConfigError, match="--to: expected mooncake, dynamo, aiperf, found 'csv'"):
        write(trace, tmp_path / "out", "csv", "m")


def test_trace_writer_compresses_gz_file(tmp_path: Path) -> None:
    trace, out = read(written(tmp_path, MOONCAKE)), tmp_path / "out.jsonl.gz"
    write(trace, out, "mooncake", "m")
    assert gzip.decompress(out.read_bytes()).decode() == (tmp_path / "trace.jsonl").read_text()
    assert read(out) == trace


def test_aiperf_export_has_one_body_per_turn(tmp_path: Path) -> None:
    """The bodies are those that `trivium trace send` sends."""
    trace = read(written(tmp_path, [*SESSIONS, *MOONCAKE[1:]]))
    out = tmp_path / "inputs.json"
    write(trace, out, "aiperf", "m")
    data = json.loads(out.read_text())["data"]
    sessions = {session["session_id"]: session["payloads"] for session in data}
    assert {name: len(payloads) for name, payloads in sessions.items()} == {
        "r2": 1,
        "r3": 1,
        "a": 2,
    }
    turns = [arrival for arrival in with_request_ids(trace) if arrival.session_id == "a"]
    assert sessions["a"] == [body(trace, turn, "m") for turn in turns]
