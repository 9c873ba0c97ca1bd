"""What a shadow would have done, of a deployment that is simulated, so that all is known."""

from dataclasses import replace

import pytest

from infra.replay.simulation.comparison import (
    LIVE,
    SHADOW,
    compare_outcomes,
    compare_placements,
)
from infra.replay.simulation.figures import figures
from infra.replay.simulation.traffic import RecordedTraffic
from schemas.errors import RecordError
from schemas.records import Decision, Mode, Orchestration
from tests.infra.replay.simulation.test_run import recorded


@pytest.fixture(scope="module")
def traffic() -> RecordedTraffic:
    return recorded(0.5)


def as_local(decision: Decision) -> Decision:
    """Return the decision with its prompt computed where the session is."""
    return replace(
        decision,
        mode=Mode.LOCAL,
        orchestration=Orchestration.NONE,
        prefill_worker="",
        prefill_epoch=0,
        decode_worker="decode-0",
        decode_epoch=1,
    )


def test_agreement_simulates_only_differing_placements(
    traffic: RecordedTraffic,
) -> None:
    later = [
        decision
        for decision in traffic.placements.values()
        if traffic.requests[decision.request_id].turn
    ]
    remote = {decision.request_id for decision in later if decision.mode is Mode.REMOTE}
    assert remote
    shadow = [
        as_local(decision) if decision.request_id in remote else decision
        for decision in traffic.placements.values()
    ]
    result = compare_placements(traffic, shadow)
    changes = result.changes
    assert changes.placements == len(traffic.placements)
    assert (result.differ, changes.same) == (remote, changes.placements - len(remote))
    assert dict(changes.modes) == {("remote", "local"): len(remote)}
    rows = compare_outcomes(traffic, result, {"policy": "static", "local_share": "1"})
    assert rows[LIVE] == figures(traffic.outcomes.values())
    assert rows["agree, live"]["answers"] == changes.same
    assert rows["differ, live"]["local_share"] == 0.0
    assert rows["differ, simulated as it was"]["local_share"] < 0.2
    assert rows["differ, simulated with the shadow"]["local_share"] > 0.9
    true = figures(recorded(1.0).outcomes.values())
    assert rows[SHADOW]["answers"] == changes.placements
    assert rows[SHADOW]["local_share"] == pytest.approx(true["local_share"], abs=0.05)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert rows[SHADOW][name]["p50"] == pytest.approx(true[name]["p50"], rel=0.15)


def test_agreement_skips_simulator_when_all_placements_match(traffic: RecordedTraffic) -> None:
    result = compare_placements(traffic, traffic.placements.values())
    assert result.changes.same == result.changes.placements > 0
    rows = compare_outcomes(traffic, result, {})
    assert list(rows) == [LIVE, SHADOW, "agree, live"]
    assert rows[SHADOW] == rows[LIVE]


def test_agreement_counts_worker_orchestration_and_wait_differences(
    traffic: RecordedTraffic,
) -> None:
    was = next(decision for decision in traffic.placements.values() if decision.mode is Mode.REMOTE)
    variants = (
        replace(was, prefill_worker="prefill-9"),
        replace(was, orchestration=Orchestration.NONE),
        replace(was, mode=Mode.NONE),
    )
    elsewhere, otherwise, waits = (
        compare_placements(traffic, [variant]).changes for variant in variants
    )
    assert (elsewhere.workers, otherwise.orchestrations) == (1, 1)
    assert dict(waits.modes) == {("remote", "wait"): 1}
    assert waits.unseen == len(traffic.placements) - 1


def test_agreement_refuses_span_without_shadow_decisions(traffic: RecordedTraffic) -> None:
    with pytest.raises(RecordError, match=r"decisions\.shadow: no shadow has decided anything"):
        compare_placements(traffic, [])
