"""A replay decides what was decided; the first difference is found, and told with its input."""

from pathlib import Path
from typing import Any

import pytest

from infra.replay.replaying import replay
from infra.traces import recording
from infra.traces.recording import LINE, open_recording
from schemas.errors import RecordError
from streams.core.effects import Decide
from streams.core.events import RequestArrived
from streams.core.handlers.dispatch import Dispatcher
from streams.core.requests.live import LiveRequest
from streams.journal.journal import STOPPED, TICK
from tests.infra.replay.played_router import CODEC, PlayedRouter, answered
from tests.streams import builders

NAMES = [f"r{number}" for number in range(6)]


def altered(path: Path, name: str, **changes: Any) -> Path:
    """Rewrite the recording so that one request was another one."""
    with open_recording(path) as source:
        rows = list(source.rows())
    for number, row in enumerate(rows):
        if row.kind == LINE and row.topic == "requests":
            if CODEC.decode(row.value).request_id == name:
                changed = builders.request(name, session_id=name, **changes)
                rows[number] = row._replace(value=CODEC.encode(changed))
    recording.write(path, {}, rows)
    return path


def test_replay_equals_recorded_run(tmp_path: Path) -> None:
    played = answered(PlayedRouter(), NAMES)
    played.journal.stop(played.now_ms)
    report = replay(played.recorded(tmp_path / "a.avro"))
    (life,) = report.lives
    assert report.is_equal and life.is_stopped
    assert life.with_effects >= len(NAMES)
    assert life.events == 3 + 3 * len(NAMES)


def test_replay_starts_at_snapshot_before_span(tmp_path: Path) -> None:
    """A router lives for weeks, and the journal keeps one day."""
    played = answered(PlayedRouter(), NAMES[:3])
    played.snapshot()
    since_ms = played.now_ms + 1
    for name in NAMES[3:]:
        played.happens("requests", builders.request(name, session_id=name))
    report = replay(played.recorded(tmp_path / "a.avro", since_ms))
    (life,) = report.lives
    assert report.is_equal and life.with_effects
    assert life.events == len(NAMES[3:])


def test_replay_reports_first_difference_with_its_event(tmp_path: Path) -> None:
    path = answered(PlayedRouter(), NAMES).recorded(tmp_path / "a.avro")
    report = replay(altered(path, "r2", tokens=4_000))
    (life,) = report.lives
    assert not report.is_equal
    assert life.difference is not None
    assert isinstance(life.difference.event, RequestArrived)
    assert life.difference.event.request.request_id == "r2"
    (then,) = life.difference.decided
    (now,) = (effect.decision for effect in life.difference.effects if isinstance(effect, Decide))
    assert (then.request_id, then.prompt_tokens) == ("r2", 10)
    assert (now.request_id, now.prompt_tokens) == ("r2", 4_000)


def test_replay_reports_new_core_exception_as_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = answered(PlayedRouter(), NAMES).recorded(tmp_path / "a.avro")

    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(Dispatcher, "dispatch_waiting", broken)
    (life,) = replay(path).lives
    assert life.difference is not None and life.difference.error == "AssertionError: a bug"


def test_replay_reproduces_recorded_core_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed request is an effect like others."""
    played, place = answered(PlayedRouter(), NAMES[:2]), Dispatcher._place

    def broken(dispatcher: Dispatcher, live: LiveRequest, now_ms: int) -> bool:
        assert live.request_id != "r9", "a bug"
        return place(dispatcher, live, now_ms)

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "_place", broken)
        played.happens("requests", builders.request("r9", session_id="r9"))
        assert replay(played.recorded(tmp_path / "a.avro")).is_equal
    assert played.decisions[-1].kind.value == "fail"
    assert not replay(tmp_path / "a.avro").is_equal  # it is mended


def test_replay_counts_decisions_behind_end_of_journal(tmp_path: Path) -> None:
    """The last lines were lost with the router, and its later decisions are counted."""
    played = answered(PlayedRouter(), NAMES[:2])
    last_ms, life = played.now_ms, played.life()
    played.happens("requests", builders.request("r9", session_id="r9"))  # in no batch yet
    rows = list(life.rows(CODEC, played.records)) if life.cut(0, last_ms) else []
    decision_rows = [
        recording.RecordingRow(recording.RECORD, topic="decisions", value=CODEC.encode(decision))
        for decision in played.decisions
    ]
    recording.write(tmp_path / "a.avro", {}, [*rows, *decision_rows])
    report = replay(tmp_path / "a.avro")
    (replayed_life,) = report.lives
    assert report.is_equal and not replayed_life.is_stopped
    assert replayed_life.unknown == 1


def test_replay_refuses_recording_without_snapshot(tmp_path: Path) -> None:
    played = answered(PlayedRouter(), NAMES)
    life = played.life()
    life.snapshots.clear()
    assert not life.cut(0, 1 << 62)
    rows = [recording.RecordingRow(LINE, "router-a", 5, topic=TICK)]
    recording.write(tmp_path / "a.avro", {}, rows)
    with pytest.raises(RecordError, match="router-a: the recording has no snapshot"):
        replay(tmp_path / "a.avro")


def test_recorded_life_cut_drops_lines_behind_gap(tmp_path: Path) -> None:
    played = answered(PlayedRouter(), NAMES)
    life = played.life()
    del life.lines[5]
    assert life.cut(0, 1 << 62)
    assert [number for number, _ in life.lines] == [0, 1, 2, 3, 4]
    assert STOPPED not in {line.topic for _, line in life.lines}


def test_recorded_life_cut_ends_at_requested_time(tmp_path: Path) -> None:
    played = answered(PlayedRouter(), NAMES)
    life, until_ms = played.life(), played.now_ms - 50
    assert life.cut(0, until_ms)
    assert life.lines[-1][1].now_ms <= until_ms
    assert not life.cut(until_ms + 1, 1 << 62)  # nothing of it is in that span
