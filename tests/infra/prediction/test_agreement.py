"""What a shadow would have done, of a deployment that is simulated, so that all is known."""

from dataclasses import replace

import pytest

from infra.prediction.agreement import LIVE, SHADOW, agreement, outcomes
from infra.prediction.figures import figures
from infra.prediction.traffic import RecordedTraffic
from schemas.errors import RecordError
from schemas.records import Decision, Mode, Orchestration
from tests.infra.prediction.test_predictor import recorded


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
    result = agreement(traffic, shadow)
    assert result.placements == len(traffic.placements)
    assert (result.differ, result.same) == (remote, result.placements - len(remote))
    assert dict(result.modes) == {("remote", "local"): len(remote)}
    rows = outcomes(traffic, result, {"policy": "static", "local_share": "1"})
    assert rows[LIVE] == figures(traffic.outcomes.values())
    assert rows["agree, live"]["answers"] == result.same
    assert rows["differ, live"]["local_share"] == 0.0
    assert rows["differ, simulated as it was"]["local_share"] < 0.2
    assert rows["differ, simulated with the shadow"]["local_share"] > 0.9
    true = figures(recorded(1.0).outcomes.values())
    assert rows[SHADOW]["answers"] == result.placements
    assert rows[SHADOW]["local_share"] == pytest.approx(true["local_share"], abs=0.05)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert rows[SHADOW][name]["p50"] == pytest.approx(true[name]["p50"], rel=0.15)


def test_agreement_skips_simulator_when_all_placements_match(traffic: RecordedTraffic) -> None:
    result = agreement(traffic, traffic.placements.values())
    assert result.share == 1.0
    rows = outcomes(traffic, result, {})
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
    elsewhere, otherwise, waits = (agreement(traffic, [variant]) for variant in variants)
    assert (elsewhere.workers, otherwise.orchestrations) == (1, 1)
    assert dict(waits.modes) == {("remote", "wait"): 1}
    assert waits.unseen == len(traffic.placements) - 1


def test_agreement_refuses_span_without_shadow_decisions(traffic: RecordedTraffic) -> None:
    with pytest.raises(RecordError, match=r"decisions\.shadow: no shadow has decided anything"):
        agreement(traffic, [])
