"""What `learned` does while it knows little, near deadlines, and where nobody holds the history."""

from typing import Any

import pytest

from schemas.records import Estimate, Mode, Reason, Role
from streams.config import RouterSettings
from streams.core.placement.policies.learned import LearnedPolicy
from streams.core.placement.policies.policy import Choice
from tests.streams import builders
from tests.streams.core.placement.placer_fixture import PlacerFixture, case
from tests.streams.core.placement.test_policies import estimate, turn


@pytest.mark.parametrize(
    ("changes", "local_ms", "local"),
    [
        ({"append_tokens": 200}, 300, True),
        ({"append_tokens": 2_000}, 100, False),
        ({"append_tokens": 2_000, "prefill_queue": 9.0}, 200, True),
        ({"append_tokens": 2_000, "prefill_queue": 9.0}, 201, False),
        ({"append_tokens": 200, "has_home": False}, 100, False),
    ],
)
def test_learned_policy_decides_by_length_and_queue_without_samples(
    changes: dict[str, Any], local_ms: float, local: bool
) -> None:
    unsure = Estimate(ttft_local_ms=local_ms, ttft_remote_ms=200, score=1.0, samples=0)
    learned = LearnedPolicy(RouterSettings(explore_share=0.0))
    placement_turn = turn(estimate=unsure, local_ms=local_ms, remote_ms=200, **changes)
    choice = learned.choose(placement_turn)
    assert choice == Choice(local, Reason.TOO_LITTLE_KNOWN, unsure)


@pytest.mark.parametrize(
    ("slack_ms", "local_ms", "local"),
    [(40_000, 10_000, True), (40_000, 10_001, False), (1_000, 600, True), (1_000, 601, False)],
)
def test_learned_policy_goes_local_only_within_deadline(
    slack_ms: int, local_ms: float, local: bool
) -> None:
    sure_estimate = Estimate(ttft_local_ms=local_ms, ttft_remote_ms=600, score=1.0, samples=100)
    choice = LearnedPolicy(RouterSettings()).choose(turn(slack_ms=slack_ms, estimate=sure_estimate))
    assert choice == Choice(local, Reason.LEARNED, sure_estimate)


def test_learned_policy_explores_nothing_without_history() -> None:
    learned = LearnedPolicy(RouterSettings(explore_share=1.0))
    sure_estimate = estimate(0.5)
    assert learned.choose(turn(estimate=sure_estimate)).reason is Reason.EXPLORING
    assert learned.choose(turn(estimate=sure_estimate, has_home=False)).reason is Reason.LEARNED


@pytest.mark.parametrize("samples", [0, 100])
@pytest.mark.parametrize("has_home", [True, False])
def test_learned_policy_stays_local_where_one_worker_can_do_all(
    samples: int, has_home: bool
) -> None:
    """The score does not matter: a transfer is saved, and no other worker is relieved."""
    sure_estimate = Estimate(ttft_local_ms=9, ttft_remote_ms=3, score=-1.0, samples=samples)
    learned = LearnedPolicy(RouterSettings(explore_share=0.0))
    placement_turn = turn(
        estimate=sure_estimate, alone=True, has_home=has_home, append_tokens=5_000
    )
    assert learned.choose(placement_turn).local


def test_first_turns_stay_on_one_worker_where_all_have_both_roles() -> None:
    """Each worker could answer alone, and all requests were placed on two."""
    scene = PlacerFixture(policy="learned")
    roles = Role.PREFILL, Role.DECODE
    for partition, name in enumerate(("w0", "w1")):
        scene.apply(builders.registration(name, *roles, partition=partition))
        scene.apply(builders.beat(name, 1, dict.fromkeys(roles, 8)))
    placed = [scene.take(case(1_000)) for _ in range(8)]
    assert {placement.mode for placement in placed} == {Mode.LOCAL}
    assert (
        sorted(w.worker_id for placement in placed for w in placement.chosen)
        == ["w0"] * 4 + ["w1"] * 4
    )
