"""A replay in pieces, side by side, comes to what one event after the other comes to."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.replay import pieces
from infra.replay.pieces import replay_side_by_side
from infra.replay.redacting import redact
from infra.replay.replaying import ReplayReport, replay
from infra.replay.state_equality import same_state
from infra.traces import recording
from infra.traces.recording import LINE, SNAPSHOT, RecordingRow, open_recording
from schemas.errors import RecordError
from streams.config import RouterSettings
from streams.core.router import Router
from streams.journal.snapshot import pack_router, unpack_router
from tests.infra.replay.played_router import CODEC, PlayedRouter, answered
from tests.infra.replay.simulator_recorder import Recorder
from tests.infra.replay.test_replaying import altered
from tests.infra.simulator.storms import weathered
from tests.streams import builders

NAMES = [f"r{number}" for number in range(6)]


def played_on(path: Path, router_id: str = "router-a") -> Path:
    """Record a life with three snapshots and two requests behind each."""
    played = answered(PlayedRouter(router_id=router_id), NAMES[:2])
    for first in (2, 4):
        played.snapshot()
        for name in NAMES[first : first + 2]:
            played.happens("requests", builders.request(name, session_id=name))
    played.journal.stop(played.now_ms)
    return played.recorded(path)


def both(path: Path) -> ReplayReport:
    """Replay in one go and in pieces, and return the report of the pieces."""
    sequential_report, parallel_report = replay(path), replay_side_by_side(path, 2)
    assert sequential_report.lives == parallel_report.lives
    return parallel_report


def rows_of(path: Path) -> list[RecordingRow]:
    with open_recording(path) as source:
        return list(source.rows())


def test_recording_places_snapshots_before_their_lines(tmp_path: Path) -> None:
    rows = rows_of(played_on(tmp_path / "a.avro"))
    places = [place for place, row in enumerate(rows) if row.kind == SNAPSHOT]
    assert len(places) == 3
    assert all(rows[place + 1].seq == rows[place].seq for place in places)


def test_recorded_life_cut_drops_snapshots_outside_span(tmp_path: Path) -> None:
    played = answered(PlayedRouter(), NAMES[:2])
    played.snapshot()
    since_ms = played.now_ms + 1
    played.happens("requests", builders.request("r2", session_id="r2"))
    until_ms = played.now_ms
    played.snapshot()
    played.happens("requests", builders.request("r3", session_id="r3"))
    life = played.life()
    assert life.cut(since_ms, until_ms)
    assert [parts[0].seq for parts in life.snapshots] == [life.lines[0][0]]


def test_parallel_replay_equals_sequential_replay(tmp_path: Path) -> None:
    report = both(played_on(tmp_path / "a.avro"))
    (life,) = report.lives
    assert report.is_equal and life.is_stopped
    assert life.with_effects >= len(NAMES)


@pytest.mark.parametrize("name", ["r0", "r2", "r5"])
def test_parallel_replay_finds_same_first_difference(tmp_path: Path, name: str) -> None:
    """The difference is found in whichever piece it lies."""
    path = altered(played_on(tmp_path / "a.avro"), name, tokens=4_000)
    (life,) = both(path).lives
    assert life.difference is not None
    assert len(life.difference.decided) == 1


def test_parallel_replay_finds_differences_of_several_routers(tmp_path: Path) -> None:
    rows = rows_of(altered(played_on(tmp_path / "a.avro"), "r3", tokens=4_000))
    rows += rows_of(played_on(tmp_path / "b.avro", "router-b"))
    lives = [row for row in rows if row.kind != recording.RECORD]
    recording.write(tmp_path / "a.avro", {}, [*lives, *(r for r in rows if r not in lives)])
    first, second = both(tmp_path / "a.avro").lives
    assert first.difference is not None and second.difference is None


def test_parallel_replay_falls_back_when_pieces_do_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece is equal in itself, but does not continue the piece before it."""
    path = played_on(tmp_path / "a.avro")
    rows = rows_of(path)
    changed = replace(
        CODEC.decode(next(row.value for row in rows if row.kind == LINE and row.topic == "fleet")),
        member_id="replica-0",
    )
    place = max(p for p, row in enumerate(rows) if row.kind == SNAPSHOT and p < len(rows) // 2)
    row = RecordingRow(
        LINE, "router-a", rows[0].router_epoch, 0, "fleet", now_ms=rows[place - 1].now_ms
    )
    rows.insert(place, row._replace(value=CODEC.encode(changed)))  # nothing follows from it there
    recording.write(path, {}, rows)
    in_one_go: list[Path] = []

    def noted(path: Path) -> ReplayReport:
        in_one_go.append(path)
        return replay(path)

    monkeypatch.setattr(pieces, "replay", noted)
    both(path)
    assert in_one_go == [path]


def test_parallel_replay_refuses_recording_without_snapshot(tmp_path: Path) -> None:
    rows = [row for row in rows_of(played_on(tmp_path / "a.avro")) if row.kind != SNAPSHOT]
    rows += [RecordingRow(LINE, "router-b", 5, topic="tick")]
    recording.write(tmp_path / "a.avro", {}, rows)
    with pytest.raises(RecordError, match=r"router-.: the recording has no snapshot"):
        replay_side_by_side(tmp_path / "a.avro", 2)


@pytest.mark.parametrize("seed", range(2))
def test_parallel_replay_of_storm_equals_sequential_replay(tmp_path: Path, seed: int) -> None:
    recorder = Recorder(goes_on=True)
    weathered(seed, extra_checkers=[recorder], searching=seed == 1)
    assert sum(row.kind == SNAPSHOT for row in recorder.rows) > recorder.rows[-1].router_epoch
    recording.write(tmp_path / "a.avro", {}, recorder.all_rows)
    assert _in_pieces(tmp_path / "a.avro").is_equal
    recording.write(tmp_path / "a.avro", {}, redact(recorder.all_rows, names=True))
    assert _in_pieces(tmp_path / "a.avro").is_equal


def _in_pieces(path: Path) -> ReplayReport:
    """Replay both ways, where no piece may be replayed again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(pieces, "replay")
        return both(path)


def _router(names: Iterable[str] = NAMES) -> Router:
    return answered(PlayedRouter(), names).router


def test_router_state_equals_its_unpacked_copy() -> None:
    router = _router()
    assert same_state(router, unpack_router(pack_router(router)))
    assert same_state(router, _router())


def test_router_state_differs_by_requests_id_and_order() -> None:
    assert not same_state(_router(), _router(NAMES[:-1]))
    assert not same_state(Router("a", RouterSettings()), Router("b", RouterSettings()))
    assert not same_state(_router(), _router([NAMES[1], NAMES[0], *NAMES[2:]]))


def test_state_equality_compares_types_order_and_shared_references() -> None:
    def with_tables(value: object) -> Router:
        router = Router("a", RouterSettings())
        router.tables.effects = value  # type: ignore[assignment]  # any value will do
        return router

    same: list[int] = []
    for first, second in (
        ([0.0], [-0.0]),
        ([1], [1.0]),
        ([1], [1, 2]),
        ({1: 1, 2: 2}, {2: 2, 1: 1}),
        ({1: 1}, {1: 2}),
        ([same, same], [[], []]),
        ([[], []], [same, same]),
        ([None], [[]]),
    ):
        assert same_state(with_tables(first), with_tables(first))
        assert not same_state(with_tables(first), with_tables(second))
