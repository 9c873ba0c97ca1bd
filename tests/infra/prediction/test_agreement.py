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
    """What a shadow says that would have computed the prompt where the session is."""
    return replace(
        decision,
        mode=Mode.LOCAL,
        orchestration=Orchestration.NONE,
        prefill_worker="",
        prefill_epoch=0,
        decode_worker="decode-0",
        decode_epoch=1,
    )


def test_where_both_agree_outcomes_count_and_elsewhere_the_simulator(
    traffic: RecordedTraffic,
) -> None:
    later = [each for each in traffic.placements.values() if traffic.requests[each.request_id].turn]
    remote = {each.request_id for each in later if each.mode is Mode.REMOTE}
    assert remote
    shadow = [
        as_local(each) if each.request_id in remote else each
        for each in traffic.placements.values()
    ]
    found = agreement(traffic, shadow)
    assert found.placements == len(traffic.placements)
    assert (found.differ, found.same) == (remote, found.placements - len(remote))
    assert dict(found.modes) == {("remote", "local"): len(remote)}
    rows = outcomes(traffic, found, {"policy": "static", "local_share": "1"})
    assert rows[LIVE] == figures(traffic.outcomes.values())
    assert rows["agree, live"]["answers"] == found.same
    assert rows["differ, live"]["local_share"] == 0.0
    assert rows["differ, simulated as it was"]["local_share"] < 0.2
    assert rows["differ, simulated with the shadow"]["local_share"] > 0.9
    true = figures(recorded(1.0).outcomes.values())
    assert rows[SHADOW]["answers"] == found.placements
    assert rows[SHADOW]["local_share"] == pytest.approx(true["local_share"], abs=0.05)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert rows[SHADOW][name]["p50"] == pytest.approx(true[name]["p50"], rel=0.15)


def test_full_agreement_needs_no_simulator(traffic: RecordedTraffic) -> None:
    found = agreement(traffic, traffic.placements.values())
    assert found.share == 1.0
    rows = outcomes(traffic, found, {})
    assert list(rows) == [LIVE, SHADOW, "agree, live"]
    assert rows[SHADOW] == rows[LIVE]


def test_other_workers_orders_and_waits_are_told_apart(traffic: RecordedTraffic) -> None:
    was = next(each for each in traffic.placements.values() if each.mode is Mode.REMOTE)
    others = (
        replace(was, prefill_worker="prefill-9"),
        replace(was, orchestration=Orchestration.NONE),
        replace(was, mode=Mode.NONE),
    )
    elsewhere, otherwise, waits = (agreement(traffic, [each]) for each in others)
    assert (elsewhere.workers, otherwise.orchestrations) == (1, 1)
    assert dict(waits.modes) == {("remote", "wait"): 1}
    assert waits.unseen == len(traffic.placements) - 1


def test_a_span_without_a_shadow_is_refused(traffic: RecordedTraffic) -> None:
    with pytest.raises(RecordError, match=r"decisions\.shadow: no shadow has decided anything"):
        agreement(traffic, [])
