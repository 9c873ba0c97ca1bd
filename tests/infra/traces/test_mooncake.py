"""Mooncake's JSON lines and agentic Mooncake version 2, read and written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.traces.formats import read, write
from infra.traces.trace import After, Arrival, Trace
from schemas.errors import ConfigError
from tests.infra.traces.samples import AGENTIC, MOONCAKE, SESSIONS, written


def test_mooncake_trace_round_trips(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    trace = read(path)
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert [arrival.at_ms for arrival in trace.arrivals] == [0.0, 105.0, 274.5]
    copy_path = tmp_path / "again.jsonl"
    write(trace, copy_path, "mooncake", "m")
    assert copy_path.read_text() == path.read_text()


def test_mooncake_turn_waits_delay_after_previous_turn(tmp_path: Path) -> None:
    trace = read(written(tmp_path, SESSIONS))
    first, second = trace.arrivals
    assert (first.priority, second.priority) == ("interactive", "")
    assert (second.at_ms, second.prompt_tokens, second.output_tokens) == (1_050.0, 1_200, 7)
    assert [*second.after] == [After(request_id=first.request_id, delay_ms=50.0)]
    copy_path = tmp_path / "again.jsonl"
    write(trace, copy_path, "mooncake", "m")
    assert read(copy_path) == trace


def test_mooncake_row_waits_for_named_requests(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"request_id": "root", "input_length": 4, "output_length": 2, "timestamp": 7},
        {"request_id": "child", "input_length": 4, "output_length": 1, "wait_for": ["root"],
         "delay": 2, "tool_wait_ms": 3},
    ]  # fmt: skip
    trace = read(written(tmp_path, rows))
    child = next(arrival for arrival in trace.arrivals if arrival.request_id == "child")
    assert [*child.after] == [After(request_id="root", delay_ms=5.0)]
    with pytest.raises(ConfigError, match="child: expected a request that waits for the turn"):
        write(trace, tmp_path / "again.jsonl", "mooncake", "m")
    assert not (tmp_path / "again.jsonl").exists()


def test_agentic_mooncake_has_typed_dependencies_and_local_block_ids(tmp_path: Path) -> None:
    trace = read(written(tmp_path, AGENTIC))
    assert (trace.format, trace.block_tokens) == ("agentic", 64)
    root, sub, next_play = trace.arrivals
    assert [*sub.after] == [
        After(request_id="p:0", delay_ms=20.0, trigger="dispatch", relation="spawn")
    ]
    assert sub.blocks[0] == root.blocks[0] != next_play.blocks[0]
    assert (next_play.at_ms, next_play.model) == (30.0, "m")


def test_mooncake_export_merges_small_blocks(tmp_path: Path) -> None:
    """Readers take each id for 512 tokens, so that only whole equal prefixes share ids."""
    eight, parts = tuple(range(8)), (tuple(range(8)), (0, 1, 2, 3, 4, 5, 6, 70))
    blocks = (eight + (8, 9), *parts, eight + (8,), (*parts[1], 8, 9))
    arrivals = [
        Arrival(at_ms=0.0, prompt_tokens=64 * len(block_ids), output_tokens=1, blocks=block_ids)
        for block_ids in blocks
    ]
    trace = Trace(format="test", arrivals=arrivals, block_tokens=64)
    path = tmp_path / "trace.jsonl"
    write(trace, path, "mooncake", "m")
    assert [[*arrival.blocks] for arrival in read(path).arrivals] == [
        [0, 1],
        [0],
        [2],
        [0, 3],
        [2, 4],
    ]
    with pytest.raises(ConfigError, match="blocks of which some make 512 tokens, found .* of 100"):
        write(replace(trace, block_tokens=100), path, "mooncake", "m")
    with pytest.raises(ConfigError, match="found blocks of 1024"):
        write(replace(trace, block_tokens=1_024), path, "mooncake", "m")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 0, "input_length": 4}, r":4: output_length: .*, found nothing"),
        ({"timestamp": 0, "input_length": True, "output_length": 1}, r":4: input_length: "),
        ({"timestamp": 0, "input_length": 4, "output_length": -1}, r":4: output_length: "),
        ({"timestamp": 0, "input_length": 4, "output_length": 1.5}, r":4: output_length: "),
        ({"input_length": 4, "output_length": 1}, r":4: timestamp: expected a number from 0"),
        ({"timestamp": 0, "text_input": "a", "output_length": 1}, r":4: input_length: .*a text"),
        (
            {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": ["a"]},
            r":4: hash_ids: expected a whole number from 0, found 'a'",
        ),
        (
            {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": 7},
            r":4: hash_ids: expected a list of whole numbers, found 7",
        ),
    ],
)
def test_mooncake_parse_error_names_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, [*MOONCAKE, row]))


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (0, {"version": 3}, r":1: version: expected 2, found 3"),
        (0, {"hash_id_scope": "global"}, r":1: hash_id_scope: expected local, found 'global'"),
        (0, {"block_size": 0}, r":1: block_size: expected a whole number from 1"),
        (3, {"request_id": "p:0"}, r":4: request_id: expected an id that no other row has"),
        (2, {"dependencies": [{"request_id": "p:0", "trigger": "end"}]}, r":3: relation: "),
        (
            2,
            {"dependencies": [{"request_id": "p:0", "trigger": "end", "relation": "join"}]},
            r":3: trigger: expected dispatch or completion, found 'end'",
        ),
    ],
)
def test_agentic_mooncake_parse_error_names_line(
    line: int, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = [dict(row) for row in AGENTIC]
    rows[line] |= change
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, rows))


def test_mooncake_json_error_names_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n{\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: expected JSON"):
        read(path)
