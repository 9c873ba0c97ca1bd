"""aiperf's inputs.json."""

import json
from pathlib import Path

from infra.traces.formats import read, write
from infra.traces.prompts import body
from infra.traces.trace import with_request_ids
from tests.infra.traces.samples import MOONCAKE, SESSIONS, written


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
