"""What `learned` does while it knows little, near deadlines, and where nobody holds the history."""

from typing import Any

import pytest

from schemas.records import Estimate, Mode, Reason, Role
from streams.config import RouterSettings
from streams.core.placement.policies import Choice, LearnedPolicy
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
def test_learned_assumes_little(changes: dict[str, Any], local_ms: float, local: bool) -> None:
    unsure = Estimate(ttft_local_ms=local_ms, ttft_remote_ms=200, score=1.0, samples=0)
    learned = LearnedPolicy(RouterSettings(explore_share=0.0))
    asked = turn(estimate=unsure, local_ms=local_ms, remote_ms=200, **changes)
    found = learned.choose(asked)
    assert found == Choice(local, Reason.TOO_LITTLE_KNOWN, unsure)


@pytest.mark.parametrize(
    ("slack_ms", "local_ms", "local"),
    [(40_000, 10_000, True), (40_000, 10_001, False), (1_000, 600, True), (1_000, 601, False)],
)
def test_moving_less_is_not_paid_with_the_deadline(
    slack_ms: int, local_ms: float, local: bool
) -> None:
    known = Estimate(ttft_local_ms=local_ms, ttft_remote_ms=600, score=1.0, samples=100)
    found = LearnedPolicy(RouterSettings()).choose(turn(slack_ms=slack_ms, estimate=known))
    assert found == Choice(local, Reason.LEARNED, known)


def test_no_exploring_without_a_history() -> None:
    learned = LearnedPolicy(RouterSettings(explore_share=1.0))
    known = estimate(0.5)
    assert learned.choose(turn(estimate=known)).reason is Reason.EXPLORING
    assert learned.choose(turn(estimate=known, has_home=False)).reason is Reason.LEARNED


@pytest.mark.parametrize("samples", [0, 100])
@pytest.mark.parametrize("has_home", [True, False])
def test_what_a_worker_can_do_alone_needs_no_other(samples: int, has_home: bool) -> None:
    """Whatever the score says: a transfer is saved, and nobody is spared."""
    known = Estimate(ttft_local_ms=9, ttft_remote_ms=3, score=-1.0, samples=samples)
    learned = LearnedPolicy(RouterSettings(explore_share=0.0))
    asked = turn(estimate=known, alone=True, has_home=has_home, append_tokens=5_000)
    assert learned.choose(asked).local


def test_first_turns_need_no_other_worker_where_all_are_in_both_roles() -> None:
    """Each could answer alone, and all were placed on two."""
    scene = PlacerFixture(policy="learned")
    roles = Role.PREFILL, Role.DECODE
    for partition, name in enumerate(("w0", "w1")):
        scene.apply(builders.registration(name, *roles, partition=partition))
        scene.apply(builders.beat(name, 1, dict.fromkeys(roles, 8)))
    placed = [scene.take(case(1_000)) for _ in range(8)]
    assert {found.mode for found in placed} == {Mode.LOCAL}
    assert sorted(w.worker_id for found in placed for w in found.chosen) == ["w0"] * 4 + ["w1"] * 4
