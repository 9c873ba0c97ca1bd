"""A replay decides what was decided; the first difference is found, and told with its input."""

from pathlib import Path
from typing import Any

import pytest

from infra.replay import recording
from infra.replay.recording import LINE, open_recording
from infra.replay.replaying import replay
from schemas.errors import RecordError
from streams.core.effects import Decide
from streams.core.events import RequestArrived
from streams.core.handlers.dispatch import Dispatcher
from streams.core.requests.live import LiveRequest
from streams.journal.inputs import STOPPED, TICK
from tests.infra.replay.played import CODEC, Played, answered
from tests.streams import builders

NAMES = [f"r{number}" for number in range(6)]


def altered(path: Path, name: str, **changes: Any) -> Path:
    """The recording of another history, in which a request was another one."""
    with open_recording(path) as found:
        rows = list(found.rows())
    for number, row in enumerate(rows):
        if row.kind == LINE and row.topic == "requests":
            if CODEC.decode(row.value).request_id == name:
                changed = builders.request(name, session_id=name, **changes)
                rows[number] = row._replace(value=CODEC.encode(changed))
    recording.write(path, {}, rows)
    return path


def test_a_replay_is_equal(tmp_path: Path) -> None:
    played = answered(Played(), NAMES)
    played.journal.stop(played.now_ms)
    report = replay(played.recorded(tmp_path / "a.avro"))
    (life,) = report.lives
    assert report.is_equal and life.is_stopped
    assert life.with_effects >= len(NAMES)
    assert life.events == 3 + 3 * len(NAMES)


def test_a_replay_begins_at_a_snapshot(tmp_path: Path) -> None:
    """Lives last for weeks, the journal for a day."""
    played = answered(Played(), NAMES[:3])
    played.snapshot()
    since_ms = played.now_ms + 1
    for name in NAMES[3:]:
        played.happens("requests", builders.request(name, session_id=name))
    report = replay(played.recorded(tmp_path / "a.avro", since_ms))
    (life,) = report.lives
    assert report.is_equal and life.with_effects
    assert life.events == len(NAMES[3:])


def test_the_first_difference_is_told_with_its_input(tmp_path: Path) -> None:
    path = answered(Played(), NAMES).recorded(tmp_path / "a.avro")
    report = replay(altered(path, "r2", tokens=4_000))
    (life,) = report.lives
    assert not report.is_equal
    assert life.difference is not None
    assert isinstance(life.difference.event, RequestArrived)
    assert life.difference.event.request.request_id == "r2"
    (then,) = life.difference.decided
    (now,) = (each.decision for each in life.difference.effects if isinstance(each, Decide))
    assert (then.request_id, then.prompt_tokens) == ("r2", 10)
    assert (now.request_id, now.prompt_tokens) == ("r2", 4_000)


def test_a_core_that_raises_where_it_did_not_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = answered(Played(), NAMES).recorded(tmp_path / "a.avro")

    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(Dispatcher, "dispatch_waiting", broken)
    (life,) = replay(path).lives
    assert life.difference is not None and life.difference.error == "AssertionError: a bug"


def test_a_core_that_raised_does_so_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom it failed over is an effect like others."""
    played, place = answered(Played(), NAMES[:2]), Dispatcher._place

    def broken(dispatcher: Dispatcher, live: LiveRequest, now_ms: int) -> bool:
        assert live.request_id != "r9", "a bug"
        return place(dispatcher, live, now_ms)

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "_place", broken)
        played.happens("requests", builders.request("r9", session_id="r9"))
        assert replay(played.recorded(tmp_path / "a.avro")).is_equal
    assert played.decisions[-1].kind.value == "fail"
    assert not replay(tmp_path / "a.avro").is_equal  # it is mended


def test_a_life_that_was_cut_is_replayed_up_to_there(tmp_path: Path) -> None:
    """Its last lines were lost with it, and what it did behind them is counted."""
    played = answered(Played(), NAMES[:2])
    last_ms, life = played.now_ms, played.life()
    played.happens("requests", builders.request("r9", session_id="r9"))  # in no batch yet
    rows = list(life.rows(CODEC, played.records)) if life.cut(0, last_ms) else []
    told = [
        recording.RecordingRow(recording.RECORD, topic="decisions", value=CODEC.encode(each))
        for each in played.decisions
    ]
    recording.write(tmp_path / "a.avro", {}, [*rows, *told])
    report = replay(tmp_path / "a.avro")
    (found,) = report.lives
    assert report.is_equal and not found.is_stopped
    assert found.unknown == 1


def test_a_recording_without_a_snapshot_is_refused(tmp_path: Path) -> None:
    played = answered(Played(), NAMES)
    life = played.life()
    life.snapshots.clear()
    assert not life.cut(0, 1 << 62)
    rows = [recording.RecordingRow(LINE, "router-a", 5, topic=TICK)]
    recording.write(tmp_path / "a.avro", {}, rows)
    with pytest.raises(RecordError, match="router-a: the recording has no snapshot"):
        replay(tmp_path / "a.avro")


def test_lines_behind_a_gap_are_not_replayed(tmp_path: Path) -> None:
    played = answered(Played(), NAMES)
    life = played.life()
    del life.lines[5]
    assert life.cut(0, 1 << 62)
    assert [number for number, _ in life.lines] == [0, 1, 2, 3, 4]
    assert STOPPED not in {line.topic for _, line in life.lines}


def test_a_span_ends_where_it_is_told_to(tmp_path: Path) -> None:
    played = answered(Played(), NAMES)
    life, until_ms = played.life(), played.now_ms - 50
    assert life.cut(0, until_ms)
    assert life.lines[-1][1].now_ms <= until_ms
    assert not life.cut(until_ms + 1, 1 << 62)  # nothing of it is in that span
