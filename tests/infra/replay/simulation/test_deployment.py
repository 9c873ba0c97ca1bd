"""What would have happened: a recording's requests at workers like its own, with changes."""

from pathlib import Path

import pytest

from infra.replay.redacting import redact
from infra.replay.simulation.deployment import (
    on_hardware,
    recorded_deployment,
    shape_of,
    with_pools,
)
from infra.replay.simulation.report import Findings
from infra.replay.simulation.run import AS_IT_WAS, AS_RECORDED, Changes, simulate, what_if
from infra.replay.simulation.traffic import read
from infra.simulator.cluster import ORCHESTRATIONS
from infra.traces.recording import LINE, RecordingRow, write
from infra.traces.trace import Arrival, Trace
from schemas.codec import Codec
from schemas.errors import ConfigError, RecordError
from schemas.fleet import Member
from schemas.records import Orchestration, Role
from streams.config import RouterSettings
from tests.infra.replay.simulator_recorder import Recorder
from tests.infra.simulator.storms import weathered
from tests.streams import builders


@pytest.fixture(scope="module")
def rows() -> list[RecordingRow]:
    recorder = Recorder(looks=1_000)
    weathered(0, count=0, extra_checkers=[recorder])
    return recorder.rows


def recorded(path: Path, rows: list[RecordingRow]) -> Path:
    write(path, {"since_ms": 0, "until_ms": 1 << 62}, rows)
    return path


@pytest.mark.parametrize("gpu", ["", "h100"], ids=["measured speeds", "published hardware"])
def test_faults_delay_answers_and_lose_none(
    tmp_path: Path, rows: list[RecordingRow], gpu: str
) -> None:
    """A second run gives the same figures."""
    traffic = read(recorded(tmp_path / "a.avro", rows))

    def run(*faults: str) -> Findings:
        return what_if(traffic, Changes({}, [("kill", text) for text in faults], gpu=gpu))

    killed, broken = run("decode-1@2.5s+2s"), run("router@2s", "broker@4s")
    assert killed.workers == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    name = "kill decode-1@2.5s+2s"
    assert list(killed.runs) == [AS_RECORDED, AS_IT_WAS, name]
    before = killed.runs[AS_IT_WAS]
    assert before["answers"] == len(traffic.completed) > 50
    assert before["placed_again"] == before["unserved"] == 0
    for findings in (killed, broken):
        assert [*findings.runs.values()][-1]["answers"] == before["answers"]
        assert findings.later_ms[-1] > 1_000.0
    assert killed.runs[name]["placed_again"] > 0
    assert run("decode-1@2.5s+2s").runs == killed.runs
    assert run().later_ms == []


def test_changed_settings_and_pools_are_compared_with_recorded_deployment(
    tmp_path: Path, rows: list[RecordingRow]
) -> None:
    traffic = read(recorded(tmp_path / "a.avro", rows))
    findings = what_if(traffic, Changes({"policy": "conditional"}, pools="2P3D"))
    assert list(findings.runs) == [AS_RECORDED, AS_IT_WAS, "policy=conditional, 2P3D"]
    assert len(findings.workers) == 5
    with pytest.raises(ConfigError, match="--pools: expected workers such as 2P2D.*'two'"):
        what_if(traffic, Changes({}, pools="two"))
    with pytest.raises(ConfigError, match="--gpu: expected one of"):
        what_if(traffic, Changes({}, gpu="abacus"))


def test_redacted_recording_gives_same_simulation(tmp_path: Path, rows: list[RecordingRow]) -> None:
    whole = read(recorded(tmp_path / "a.avro", rows))
    less = read(recorded(tmp_path / "b.avro", list(redact(rows, names=True))))
    assert recorded_deployment(whole) == recorded_deployment(less)
    assert what_if(whole, Changes({})).runs == what_if(less, Changes({})).runs


def test_simulated_turns_of_trace_reuse_kv_of_their_sessions() -> None:
    """A block is as long as the trace states, and the session id joins turns."""
    opening = [1] * 8
    arrivals = [
        Arrival(at_ms=0.0, prompt_tokens=1_024, output_tokens=4, blocks=opening, session_id="a"),
        Arrival(at_ms=900.0, prompt_tokens=1_024, output_tokens=4, blocks=[2] * 8),
        Arrival(at_ms=2_000.0, prompt_tokens=1_200, output_tokens=4, blocks=[*opening, 3, 4],
                session_id="a"),
    ]  # fmt: skip
    trace = Trace(format="log", arrivals=arrivals, block_tokens=128)
    run = simulate(with_pools(on_hardware(None, "", ""), "1R"), trace)
    outcomes = [run.outcomes[name] for name in ("r0", "r1", "r2")]
    assert [outcome.session_id for outcome in outcomes] == ["s0", "s1", "s0"]
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 0, 1_024]


def test_traffic_without_workers_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a.avro", [RecordingRow(LINE, "a", 1, topic="tick")])
    with pytest.raises(RecordError, match="a: the recording has no snapshot of it"):
        read(path)


def test_deployment_includes_worker_registered_later(
    tmp_path: Path, rows: list[RecordingRow]
) -> None:
    """Orchestrations are those of all workers: a fleet of vLLM has none of other engines."""
    capability = builders.capability("zoe", Orchestration.PREFILL_FIRST)
    late = builders.registration("zoe", Role.DECODE, capability=capability)
    line = RecordingRow(LINE, "router-0", 1, topic="fleet", value=Codec().encode(late))
    before = recorded_deployment(read(recorded(tmp_path / "a.avro", rows)))
    assert set(before.orchestrations) == set(ORCHESTRATIONS)
    traffic = read(recorded(tmp_path / "a.avro", [*rows, line]))
    deployment = recorded_deployment(traffic)
    assert deployment.shape.roles()[-1] == ("zoe", (Role.DECODE,))
    assert deployment.shape.name == "2P3D"
    assert deployment.orchestrations == (Orchestration.PREFILL_FIRST,)
    outcomes = simulate(deployment, traffic).outcomes.values()
    assert {outcome.orchestration for outcome in outcomes} <= {
        Orchestration.PREFILL_FIRST,
        Orchestration.NONE,
    }


def test_shape_counts_recorded_workers_by_role() -> None:
    def member(name: str, *roles: Role) -> Member:
        return Member(builders.registration(name, *roles), 0)

    pool = [member("p", Role.PREFILL), member("d", Role.DECODE), member("r", Role.REPLICA)]
    shape = shape_of([*pool, member("b", Role.DECODE, Role.PREFILL)])
    assert shape.name == "1P1D1B1R"
    assert shape.roles()[0] == ("b", (Role.PREFILL, Role.DECODE))


def test_hardware_has_default_settings_for_traces() -> None:
    deployment = on_hardware(None, "", "qwen2.5-14b")
    assert deployment.settings == RouterSettings()
    assert (deployment.setup.model.name, deployment.setup.gpu.name) == ("Qwen2.5-14B", "H100 SXM")
