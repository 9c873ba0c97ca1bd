"""What would have happened: a recording's requests at workers like its own, with faults."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.evaluate.replays.deployment import deployment
from infra.evaluate.replays.faults import faults_of
from infra.evaluate.replays.whatif import ReplayResult, later_ms, replay_trace, setup_of
from infra.replay.recording import LINE, SNAPSHOT, RecordingRow, write
from infra.replay.redacting import redact
from infra.simulator.cluster import ORCHESTRATIONS
from infra.simulator.shape import ClusterShape
from infra.traces.from_log import read_recording
from infra.traces.trace import Arrival, Trace
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.records import JournalSnapshot, Orchestration, Role
from streams.config import RouterSettings
from streams.core.router import Router
from streams.journal.snapshot import pack_router
from tests.infra.replay.simulator_recorder import Recorder
from tests.infra.simulator.storms import weathered
from tests.streams import builders

SETUP = setup_of()


@pytest.fixture(scope="module")
def rows() -> list[RecordingRow]:
    recorder = Recorder(looks=1_000)
    weathered(0, count=0, extra_checkers=[recorder])
    return recorder.rows


def recorded(path: Path, rows: list[RecordingRow]) -> Path:
    write(path, {"since_ms": 0, "until_ms": 1 << 62}, rows)
    return path


def test_replay_delays_answers_after_kill(tmp_path: Path, rows: list[RecordingRow]) -> None:
    """No answer is lost, answers come later, and a second run gives the same figures."""
    path = recorded(tmp_path / "a.avro", rows)
    trace = read_recording(path, SETUP.block_tokens)
    shape, settings = deployment(path)
    names = [name for name, _ in shape.roles()]
    assert names == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert settings.policy == "static"

    def run(*faults: str) -> ReplayResult:
        struck = [fault for text in faults for fault in faults_of("kill", text, names)]
        return replay_trace(trace, shape, settings, struck, setup=SETUP)

    before, killed, broken = run(), run("decode-1@2.5s+2s"), run("router@2s", "broker@4s")
    assert before.figures()["completed"] == len(trace.arrivals) > 50
    assert before.figures()["placed again"] == 0
    for after in (killed, broken):
        assert after.figures()["completed"] == len(trace.arrivals)
        assert later_ms(before, after)[-1] > 1_000.0
    assert killed.figures()["placed again"] > 0
    assert run("decode-1@2.5s+2s").figures() == killed.figures()
    assert not later_ms(before, run())


def test_redacted_recording_gives_same_traffic(tmp_path: Path, rows: list[RecordingRow]) -> None:
    whole = recorded(tmp_path / "a.avro", rows)
    less = recorded(tmp_path / "b.avro", list(redact(rows, names=True)))
    traces = [read_recording(path, SETUP.block_tokens) for path in (whole, less)]
    assert traces[0] == traces[1]
    assert deployment(whole) == deployment(less)


def test_replayed_turns_reuse_kv_of_their_sessions() -> None:
    """A block is as long as the trace states, and the session id joins turns."""
    opening = [1] * 8
    arrivals = [
        Arrival(at_ms=0.0, prompt_tokens=1_024, output_tokens=4, blocks=opening, session_id="a"),
        Arrival(at_ms=900.0, prompt_tokens=1_024, output_tokens=4, blocks=[2] * 8),
        Arrival(at_ms=2_000.0, prompt_tokens=1_200, output_tokens=4, blocks=[*opening, 3, 4],
                session_id="a"),
    ]  # fmt: skip
    trace = Trace(format="log", arrivals=arrivals, block_tokens=128)
    settings = RouterSettings(policy="static", local_share=0.0)
    result = replay_trace(trace, ClusterShape.parse("1R"), settings, setup=SETUP)
    assert [request.turn for request in result.served] == [1, 1, 2]
    assert [request.session_id for request in result.served] == ["s0", "s1", "s0"]
    cached = [request.outcome.cached_tokens if request.outcome else -1 for request in result.served]
    assert cached[:2] == [0, 0] and cached[2] == 1_024


def test_deployment_refuses_recording_without_workers(tmp_path: Path) -> None:
    state = JournalSnapshot(
        router_id="a",
        router_epoch=1,
        seq=0,
        at_ms=0,
        version="",
        settings="",
        part=0,
        parts=1,
        state=pack_router(Router("a", RouterSettings())),
    )
    path = recorded(
        tmp_path / "a.avro", [RecordingRow(SNAPSHOT, "a", 1, value=Codec().encode(state))]
    )
    with pytest.raises(RecordError, match="expected workers, found none; name them with --pools"):
        deployment(path)
    path = recorded(tmp_path / "a.avro", [RecordingRow(LINE, "a", 1, topic="tick")])
    with pytest.raises(RecordError, match="expected a router's state, found none"):
        deployment(path)


def test_deployment_includes_worker_registered_later(
    tmp_path: Path, rows: list[RecordingRow]
) -> None:
    late = builders.registration("zoe", Role.REPLICA)
    line = RecordingRow(LINE, "router-0", 1, topic="fleet", value=Codec().encode(late))
    shape, _ = deployment(recorded(tmp_path / "a.avro", [*rows, line]))
    assert shape.roles()[-1] == ("zoe", (Role.REPLICA,))
    assert shape.name == "2P2D1R"
    assert set(shape.orders) == set(ORCHESTRATIONS)


def test_deployment_keeps_orders_common_to_all_workers(
    tmp_path: Path, rows: list[RecordingRow]
) -> None:
    """A fleet of vLLM is not simulated in orders that only other engines have."""
    capability = builders.capability("zoe", Orchestration.PREFILL_FIRST)
    late = builders.registration("zoe", Role.DECODE, capability=capability)
    line = RecordingRow(LINE, "router-0", 1, topic="fleet", value=Codec().encode(late))
    path = recorded(tmp_path / "a.avro", [*rows, line])
    trace, (shape, settings) = read_recording(path, SETUP.block_tokens), deployment(path)
    assert shape.orders == (Orchestration.PREFILL_FIRST,)
    run = replay_trace(trace, shape, replace(settings, orchestration="auto"), setup=SETUP)
    assert {request.orchestration for request in run.served} <= {
        Orchestration.PREFILL_FIRST,
        Orchestration.NONE,
    }
