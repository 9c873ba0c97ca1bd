"""Dynamo's request trace, read and written."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from infra.traces.formats import read, write
from schemas.errors import ConfigError
from tests.infra.traces.samples import AGENTIC, AZURE, SESSIONS, request_end, written


def test_dynamo_trace_round_trips(tmp_path: Path) -> None:
    trace = read(written(tmp_path, [request_end(0), request_end(9)]))
    assert (trace.format, trace.block_tokens) == ("dynamo", 64)
    assert trace.began_unix_ms == 1_777_312_800_000
    first, second = trace.arrivals
    assert (second.at_ms, second.prompt_tokens, second.output_tokens) == (9.0, 100, 16)
    assert (second.request_id, second.total_ms) == ("d9", 1_000.0)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    copy_path = tmp_path / "again.jsonl"
    write(trace, copy_path, "dynamo", "")
    assert read(copy_path) == trace


def test_dynamo_reader_accepts_envelope_gzip_and_other_row_kinds(tmp_path: Path) -> None:
    payload = {"schema": "dynamo.request.trace.v1", "event_type": "request_payload"}
    rows = [{"timestamp": 5, "event": row} for row in (payload, request_end(0))]
    path = tmp_path / "trace.000001.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    trace = read(path)
    assert [arrival.request_id for arrival in trace.arrivals] == ["d0"]
    assert trace.left_out == {"request_payload": 1}


def test_dynamo_trace_needs_sessions_in_all_requests_or_none(tmp_path: Path) -> None:
    session = {"agent_context": {"session_id": "s"}}
    trace = read(written(tmp_path, [request_end(0, **session), request_end(1, **session)]))
    assert {arrival.session_id for arrival in trace.arrivals} == {"s"}
    copy_path = tmp_path / "again.jsonl"
    write(trace, copy_path, "dynamo", "")
    assert read(copy_path) == trace
    with pytest.raises(ConfigError, match=r":2: agent_context: expected one in every request"):
        read(written(tmp_path, [request_end(0, **session), request_end(1)]))


def test_dynamo_export_gives_unique_hashes_without_block_ids(tmp_path: Path) -> None:
    """Dynamo's loader demands a hash for each block."""
    path, out = tmp_path / "a.csv", tmp_path / "out.jsonl"
    path.write_text(AZURE)
    write(read(path), out, "dynamo", "m")
    rows = [json.loads(line)["request"] for line in out.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["m", "m"]
    hashes = [row["replay"]["input_sequence_hashes"] for row in rows]
    assert [len(row_hashes) for row_hashes in hashes] == [10, 7]
    assert len({*hashes[0], *hashes[1]}) == 17
    assert rows[1]["request_received_ms"] - rows[0]["request_received_ms"] == 52


def test_dynamo_export_refuses_mixed_sessions_and_dependencies(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    alone = {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(ConfigError, match="expected a session for every request or for none"):
        write(read(written(tmp_path, [*SESSIONS, alone])), out, "dynamo", "")
    with pytest.raises(ConfigError, match="p:1: expected a request that waits for the turn before"):
        write(read(written(tmp_path, AGENTIC)), out, "dynamo", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (request_end(1, replay={"input_sequence_hashes": [1]}), r":2: .*expected 2 for 100 tokens"),
        (request_end(1, replay={"trace_block_size": 0}), r":2: trace_block_size: "),
        (
            request_end(1, replay={"trace_block_size": 50}),
            r":2: trace_block_size: expected 64 as before, found 50",
        ),
        (request_end(0), r":2: request_id: expected an id that no other has, found 'd0'"),
        (request_end(1, event_type="request_begin"), r":2: event_type: expected request_end"),
        (request_end(1, schema="dynamo.request.trace.v2"), r":2: schema: expected dynamo"),
        (request_end(1, request={"request_id": "x"}), r":2: replay: expected an object"),
    ],
)
def test_dynamo_parse_error_names_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, [request_end(0), row]))
