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


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    trace = read(path)
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert [each.at_ms for each in trace.arrivals] == [0.0, 105.0, 274.5]
    again = tmp_path / "again.jsonl"
    write(trace, again, "mooncake", "m")
    assert again.read_text() == path.read_text()


def test_a_turn_waits_its_delay_after_the_one_before(tmp_path: Path) -> None:
    trace = read(written(tmp_path, SESSIONS))
    one, two = trace.arrivals
    assert (one.priority, two.priority) == ("interactive", "")
    assert (two.at_ms, two.prompt_tokens, two.output_tokens) == (1_050.0, 1_200, 7)
    assert [*two.after] == [After(request_id=one.request_id, delay_ms=50.0)]
    again = tmp_path / "again.jsonl"
    write(trace, again, "mooncake", "m")
    assert read(again) == trace


def test_a_row_may_wait_for_others(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"request_id": "root", "input_length": 4, "output_length": 2, "timestamp": 7},
        {"request_id": "child", "input_length": 4, "output_length": 1, "wait_for": ["root"],
         "delay": 2, "tool_wait_ms": 3},
    ]  # fmt: skip
    trace = read(written(tmp_path, rows))
    child = next(each for each in trace.arrivals if each.request_id == "child")
    assert [*child.after] == [After(request_id="root", delay_ms=5.0)]
    with pytest.raises(ConfigError, match="child: expected a request that waits for the turn"):
        write(trace, tmp_path / "again.jsonl", "mooncake", "m")
    assert not (tmp_path / "again.jsonl").exists()


def test_version_2_has_typed_dependencies_and_ids_of_its_plays(tmp_path: Path) -> None:
    trace = read(written(tmp_path, AGENTIC))
    assert (trace.format, trace.block_tokens) == ("agentic", 64)
    root, sub, other = trace.arrivals
    assert [*sub.after] == [
        After(request_id="p:0", delay_ms=20.0, trigger="dispatch", relation="spawn")
    ]
    assert sub.blocks[0] == root.blocks[0] != other.blocks[0]
    assert (other.at_ms, other.model) == (30.0, "m")


def test_smaller_blocks_make_those_of_512_tokens(tmp_path: Path) -> None:
    """Its readers take each id for 512: what begins alike for longer is told, and no more."""
    eight, parts = tuple(range(8)), (tuple(range(8)), (0, 1, 2, 3, 4, 5, 6, 70))
    blocks = (eight + (8, 9), *parts, eight + (8,), (*parts[1], 8, 9))
    arrivals = [
        Arrival(at_ms=0.0, prompt_tokens=64 * len(each), output_tokens=1, blocks=each)
        for each in blocks
    ]
    trace = Trace(format="test", arrivals=arrivals, block_tokens=64)
    path = tmp_path / "trace.jsonl"
    write(trace, path, "mooncake", "m")
    assert [[*each.blocks] for each in read(path).arrivals] == [[0, 1], [0], [2], [0, 3], [2, 4]]
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
def test_a_bad_row_is_told_by_its_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
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
def test_a_bad_agentic_row_too(
    line: int, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = [dict(row) for row in AGENTIC]
    rows[line] |= change
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, rows))


def test_a_line_that_is_no_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n{\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: expected JSON"):
        read(path)
