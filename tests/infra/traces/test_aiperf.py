"""aiperf's inputs.json."""

import json
from pathlib import Path

from infra.traces.formats import read, write
from infra.traces.prompts import body
from infra.traces.trace import with_request_ids
from tests.infra.traces.samples import MOONCAKE, SESSIONS, written


def test_sessions_have_a_body_per_turn(tmp_path: Path) -> None:
    """What `trivium trace send` sends, under `data`, `session_id` and `payloads`."""
    trace = read(written(tmp_path, [*SESSIONS, *MOONCAKE[1:]]))
    out = tmp_path / "inputs.json"
    write(trace, out, "aiperf", "m")
    data = json.loads(out.read_text())["data"]
    sessions = {each["session_id"]: each["payloads"] for each in data}
    assert {name: len(payloads) for name, payloads in sessions.items()} == {
        "r2": 1,
        "r3": 1,
        "a": 2,
    }
    turns = [each for each in with_request_ids(trace) if each.session_id == "a"]
    assert sessions["a"] == [body(trace, each, "m") for each in turns]
