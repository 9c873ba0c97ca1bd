"""What a deployment would have done, predicted from what it did: a simulated one, all known."""

from dataclasses import replace
from typing import Any

import pytest

from infra.replay.redeciding import with_overrides
from infra.replay.simulation.deployment import recorded_deployment
from infra.replay.simulation.figures import errors, figures
from infra.replay.simulation.machine import MeasuredGpu
from infra.replay.simulation.run import simulate
from infra.replay.simulation.speeds import LinearFit, MeasuredSpeeds, measure_speeds
from infra.replay.simulation.traffic import RecordedTraffic, simulated_load
from infra.simulator.cluster import Checker, Cluster
from infra.simulator.machine.latency import Setup
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile
from infra.simulator.traffic.poisson import TurnShape as TurnShape
from schemas.records import Decision, DecisionKind, Outcome, Parsing, Phase, Request
from streams.config import RouterSettings
from tests.infra.simulator.serving import serve_all

TRUE = MeasuredSpeeds(
    prompt=LinearFit(30.0, 0.05),
    append=LinearFit(12.0, 0.05),
    step=LinearFit(10.0, 0.5),
    beside=4.0,
    transfer=LinearFit(2.0, 1e-6),
    requests_ms=(3.0,),
    hops_ms=(3.0,),
    kv_bytes_per_token=1_024,
)
PROFILE = Profile(
    first=TurnShape(input_tokens=400, output_tokens=30),
    later=TurnShape(input_tokens=60, output_tokens=40),
    turns=3,
    think_ms=500.0,
)


class RecordCollector(Checker):
    """Collect every record that the cluster writes."""

    def __init__(self) -> None:
        self.records: list[object] = []

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        self.records.append(record)


class TrueCluster(Cluster):
    """Simulate the deployment that is recorded."""

    def gpu_of(self, worker_id: str) -> Any:
        return lambda *gpu_args: MeasuredGpu(TRUE, *gpu_args)


def recorded(local_share: float, seed: int = 1) -> RecordedTraffic:
    """Record twenty seconds of simulated traffic and the answers behind it."""
    settings, collector = (
        RouterSettings(policy="static", local_share=local_share),
        RecordCollector(),
    )
    cluster = TrueCluster(
        ClusterShape(prefill=1, decode=2),
        Setup(),
        settings,
        gateways=1,
        checkers=[collector],
        timeout_ms=60_000,
    )
    serve_all(cluster, PROFILE, per_s=2.0, duration_ms=20_000.0, seed=seed)
    members = cluster.router.core.tables.fleet.view.members.values()
    traffic = RecordedTraffic(
        settings, [member for member in members if member.registration.capability]
    )
    for record in collector.records:
        match record:
            case Request():
                traffic.requests[record.request_id] = record
            case Phase():
                traffic.phases.append(record)
            case Decision(kind=DecisionKind.PLACE):
                traffic.placements[record.request_id] = record
            case Outcome():
                traffic.outcomes[record.request_id] = record
    return traffic


@pytest.fixture(scope="module")
def half() -> RecordedTraffic:
    return recorded(0.5)


def test_measured_speeds_match_simulated_gpu(half: RecordedTraffic) -> None:
    speeds = measure_speeds(half)
    assert speeds.prompt.at(400) == pytest.approx(TRUE.prompt.at(400), rel=0.05)
    assert speeds.append.at(90) == pytest.approx(TRUE.append.at(90), rel=0.1)
    assert speeds.step.at(3) == pytest.approx(TRUE.step.at(3), rel=0.1)
    assert speeds.beside == pytest.approx(TRUE.beside, rel=0.5)
    assert speeds.kv_bytes_per_token == Setup().model.kv_bytes_per_token
    assert set(speeds.requests_ms) == set(speeds.hops_ms) == {Setup().bus_ms}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prediction_matches_outcomes_of_other_local_shares(
    half: RecordedTraffic, share: float
) -> None:
    settings = with_overrides(half.settings, {"local_share": str(share)})
    predicted = simulate(replace(recorded_deployment(half), settings=settings), half)
    assert predicted.unserved == 0
    assert predicted.outcomes.keys() == half.requests.keys()
    predicted_figures = figures(predicted.outcomes.values())
    true = figures(recorded(share).outcomes.values())
    assert predicted_figures["local_share"] == pytest.approx(true["local_share"], abs=0.02)
    assert predicted_figures["kv_bytes"] == pytest.approx(true["kv_bytes"], rel=0.05)
    wrong = errors(predicted_figures, true)
    assert all(abs(wrong[name]["p50"]) < 0.08 for name in wrong), wrong
    assert all(abs(wrong[name]["p99"]) < 0.15 for name in wrong), wrong


def test_parsed_requests_are_simulated_as_text(half: RecordedTraffic) -> None:
    """Simulated workers have no parsers."""
    parsing = Parsing(tools="[]", tool_choice="auto")
    requests = {name: replace(request, parsing=parsing) for name, request in half.requests.items()}
    parsed = replace(half, requests=requests)
    predicted = simulate(recorded_deployment(parsed), parsed)
    assert predicted.unserved == 0
    assert predicted.outcomes.keys() == half.requests.keys()


def test_speeds_have_no_interference_without_local_placements() -> None:
    """A prediction does not invent what its recording lacks."""
    assert measure_speeds(recorded(0.0)).beside == 0.0


def test_script_chains_turns_and_splits_overlapping_requests(half: RecordedTraffic) -> None:
    load = simulated_load(half, begin_ms=0.0, block_tokens=64)
    assert sorted(load.request_ids.values()) == sorted(half.requests)
    assert {len(conversation.turns) for conversation in load.conversations} == {3}
    overlap_traffic = RecordedTraffic(
        half.settings, half.workers, dict(half.requests), outcomes=dict(half.outcomes)
    )
    session = [request for request in half.requests.values() if request.session_id == "c-0"]
    late, early = session[1], session[0]
    overlap_traffic.outcomes[early.request_id] = replace(
        half.outcomes[early.request_id], ended_ms=late.arrived_ms + 1
    )
    conversations = simulated_load(overlap_traffic, begin_ms=0.0, block_tokens=64).conversations
    of_session = [
        conversation for conversation in conversations if conversation.session_id == "c-0"
    ]
    assert [len(conversation.turns) for conversation in of_session] == [1, 2]
    assert [conversation.turns_before for conversation in of_session] == [0, 1]
    assert of_session[1].at_ms - of_session[0].at_ms == late.arrived_ms - early.arrived_ms
