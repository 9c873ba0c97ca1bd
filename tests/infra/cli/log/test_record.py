"""What `trivium record` and `trivium replay` print, and when they fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.cli.measure import traces
from infra.traces import recording
from infra.traces.recording import open_recording
from infra.traces.report import report
from infra.traces.sender import SentRequest
from streams.journal.journal import TICK
from tests.infra.cli.trivium_runner import trivium_here
from tests.infra.replay.played_router import PlayedRouter, answered
from tests.infra.replay.simulator_recorder import Recorder
from tests.infra.simulator.storms import weathered
from tests.infra.traces.test_resend import make_outcome, recorded, sent_requests
from tests.streams import builders


def played(tmp_path: Path) -> Path:
    return answered(PlayedRouter(), ["r1", "r2"]).recorded(tmp_path / "a.avro")


def test_record_command_rejects_empty_span(tmp_path: Path) -> None:
    options = ("--since", "1m", "--until", "2m", "-o", str(tmp_path / "a.avro"))
    code, _, errors = trivium_here("record", "--bootstrap", "127.0.0.1:1", *options)
    assert code == 2
    assert "--until: expected less than --since 1m, found 2m" in errors


def test_replay_command_reports_equal_replay(tmp_path: Path) -> None:
    code, out, _ = trivium_here("replay", str(played(tmp_path)))
    assert code == 0
    assert "router-a epoch 5: 9 events, 2 with effects, equal up to the last line" in out
    assert "equal: 9 events" in out.splitlines()[-1]
    code, out, _ = trivium_here("replay", str(played(tmp_path)), "--json")
    summary = json.loads(out)
    assert summary["is_equal"] and summary["lives"][0]["events"] == 9


def test_replay_command_shows_difference_and_fails(tmp_path: Path) -> None:
    path = played(tmp_path)
    with open_recording(path) as recording_file:
        rows = [row for row in recording_file.rows() if row.topic != "requests"]
    first = next(n for n, row in enumerate(rows) if row.topic == TICK)
    rows[first] = rows[first]._replace(effects=7)
    recording.write(path, {}, rows)
    code, out, _ = trivium_here("replay", str(path))
    assert code == 1
    assert "tick[0] offset" in out
    assert "input: Tick()" in out
    assert "recorded checksum of effects: 00000007" in out
    assert "replayed: no effects" in out
    assert "NOT equal" in out.splitlines()[-1]


def test_replay_command_applies_changed_settings(tmp_path: Path) -> None:
    path = str(played(tmp_path))
    code, out, _ = trivium_here("replay", path, "--policy", "static")
    assert code == 0
    assert "2 placements; 2 (100.0%) would be the same" in out
    code, _, errors = trivium_here("replay", path, "--set", "policy")
    assert (code, "--set: expected NAME=VALUE, found 'policy'" in errors) == (2, True)


def test_replay_command_simulates_trace_with_faults(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{second:02},800,400" for second in range(3, 9)]
    trace.write_text("\n".join(lines))
    options = ("--pools", "1P1D", "--kill", "decode-0@2.5s+1s")
    code, out, _ = trivium_here("replay", str(trace), *options)
    assert code == 0
    assert "simulated workers: prefill-0, decode-0" in out
    assert "requests took over 100 ms longer" in out.splitlines()[-1]
    code, out, _ = trivium_here("replay", str(trace), *options, "--json")
    before, after = json.loads(out)["runs"].values()
    assert before["answers"] == after["answers"] == 6
    assert after["placed_again"] > 0 == before["placed_again"]
    for wrong, why in (
        ((), "--pools: expected workers such as 2P2D: a trace names none"),
        (("--pools", "two"), "--pools: expected workers such as 2P2D, 1P1D2R or 4R, found 'two'"),
        (("--pools", "1P1D", "--gpu", "abacus"), "--gpu: expected one of"),
    ):
        code, _, errors = trivium_here("replay", str(trace), "--simulate", *wrong)
        assert (code, why in errors) == (2, True)


def test_replay_command_decides_again_and_simulates_recording(tmp_path: Path) -> None:
    recorder = Recorder(looks=1_000)
    weathered(0, count=0, extra_checkers=[recorder])
    path = tmp_path / "a.avro"
    recording.write(path, {"since_ms": 0, "until_ms": 1 << 62}, recorder.rows)
    code, out, errors = trivium_here("replay", str(path), "--simulate", "--set", "local_share=1")
    assert code == 0, errors
    for text in ("equal: ", " remote: would be local", "recorded ", "simulated ", "local_share=1 "):
        assert text in out
    code, out, _ = trivium_here("replay", str(path), "--simulate", "--set", "tick_ms=50", "--json")
    summary = json.loads(out)
    assert summary["is_equal"] and list(summary["runs"]) == ["recorded", "simulated", "tick_ms=50"]
    assert "changes" not in summary, "only a simulation can tell what this setting changes"


def test_replay_command_rejects_shadow_without_log(tmp_path: Path) -> None:
    for options in ((), ("--kill", "decode-0@1s")):
        source = "log" if options else str(played(tmp_path))
        code, _, errors = trivium_here("replay", source, "--shadow", *options)
        assert (code, "--shadow: expected with the source log" in errors) == (2, True)


def test_recording_is_sent_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resend = recorded(tmp_path, [builders.request("r1")], [make_outcome("r1")])

    def sent_to(*_: object) -> tuple[list[SentRequest], dict[str, Any]]:
        return sends, report(sends)

    monkeypatch.setattr(traces, "send_trace", sent_to)
    options = ("trace", "send", str(tmp_path / "a.avro"), "--url", "http://127.0.0.1:1")
    sends = sent_requests(resend)
    code, out, _ = trivium_here(*options)
    assert code == 0
    assert "of the former, 1 ended the same way, with as many tokens" in out
    assert "TTFT p50: recorded 100.0 ms, now 250.0 ms" in out
    sends = sent_requests(resend, error="queue_full")
    code, out, _ = trivium_here(*options)
    assert code == 1
    assert "r1: recorded stop, 12 tokens; now queue_full" in out
    code, out, _ = trivium_here(*options, "--json")
    assert (code, json.loads(out)["compared"]["failed"]) == (1, 1)
    code, out, _ = trivium_here(*options, "--scale", "0.5", "--json")
    assert (code, "compared" in json.loads(out)) == (1, False), "prompts of half the length"
