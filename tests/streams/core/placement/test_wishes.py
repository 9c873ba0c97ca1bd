"""A policy and an orchestration of the request's own: kept where they can be, named where not."""

from typing import Any

import pytest

from infra.story.steps import steps_of
from infra.story.story import build_stories
from schemas.records import Mode, Orchestration, Role, Sampling, Unmet
from streams.core.placement.answer import Placement
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session
from tests.streams.core.router_setups import pairs

P, D, C = Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT


def missed(found: Placement | None) -> tuple[str, str, Unmet]:
    assert found is not None
    return found.unmet_wishes.policy, found.unmet_wishes.orchestration, found.unmet_wishes.unmet


MET = ("", "", Unmet.NONE)


def both(*, replica_window: int = 8, **settings: Any) -> PlacerFixture:
    """A pair and a replica."""
    scene = pair(**settings)
    scene.workers(Role.REPLICA, "r0", window=replica_window)
    return scene


@pytest.mark.parametrize(
    ("wish", "mode"), [("", Mode.LOCAL), ("replica", Mode.REPLICA), ("static", Mode.REMOTE)]
)
def test_a_request_chooses_its_policy(wish: str, mode: Mode) -> None:
    """A wished policy places the request instead of the deployment's."""
    scene = both(policy="conditional", local_share=0.0)
    found = scene.place(case(1_100, session(), policy=wish))
    assert found is not None
    assert (found.mode, found.policy) == (mode, wish or "conditional")
    assert missed(found) == MET


@pytest.mark.parametrize(
    ("scene", "wish", "policy", "unmet"),
    [
        (pair(policy="static"), "replica", "static", Unmet.NO_WORKER),
        (both(replica_window=0, policy="static"), "replica", "static", Unmet.NO_WORKER),
        (pair(), "table", "learned", Unmet.UNKNOWN_POLICY),
        (pair(), "no-such", "learned", Unmet.UNKNOWN_POLICY),
    ],
)
def test_a_policy_that_cannot_be_kept_is_named_and_makes_nobody_wait(
    scene: PlacerFixture, wish: str, policy: str, unmet: Unmet
) -> None:
    """The deployment's policy places what the wished one cannot place now."""
    found = scene.place(case(policy=wish))
    assert found is not None and found.policy == policy
    assert missed(found) == (wish, "", unmet)


def test_with_replicas_alone_another_policy_is_named() -> None:
    """Not even a fallback keeps the wish."""
    scene = PlacerFixture()
    scene.workers(Role.REPLICA, "r0")
    found = scene.place(case(policy="static"))
    assert found is not None and found.policy == "replica"
    assert missed(found) == ("static", "", Unmet.NO_WORKER)


@pytest.mark.parametrize(
    ("deployment", "wish", "expected"),
    [
        ("auto", "prefill_first", P),
        ("prefill_first", "decode_first", D),
        ("prefill_first", "concurrent", C),
        ("prefill_first", "auto", C),
        ("concurrent", "", C),
        ("concurrent", "no-such", C),
    ],
)
def test_a_request_chooses_its_orchestration(
    deployment: str, wish: str, expected: Orchestration
) -> None:
    """A wished orchestration runs instead of the deployment's."""
    found = pair(orchestration=deployment).place(case(orchestration=wish))
    assert found is not None and found.orchestration is expected
    assert missed(found) == MET


@pytest.mark.parametrize("of_request", [True, False])
@pytest.mark.parametrize(
    ("changes", "engines", "expected", "unmet"),
    [
        ({}, {"orchestrations": (P, C)}, C, Unmet.ENGINES_CANNOT),
        ({}, {"orchestrations": (P,)}, P, Unmet.ENGINES_CANNOT),
        ({"max_tokens": 1}, {}, P, Unmet.ONE_TOKEN),
    ],
)
def test_an_orchestration_that_cannot_be_kept_is_named(
    of_request: bool,
    changes: dict[str, Any],
    engines: dict[str, Any],
    expected: Orchestration,
    unmet: Unmet,
) -> None:
    """Whoever wished it, request or deployment."""
    scene = PlacerFixture(orchestration="auto" if of_request else "decode_first")
    scene.workers(Role.PREFILL, "p0")
    scene.workers(Role.DECODE, "d0", **engines)
    wish: dict[str, Any] = {"orchestration": "decode_first"} if of_request else {}
    found = scene.place(case(**changes, **wish))
    assert found is not None and found.orchestration is expected
    assert missed(found) == ("", "decode_first", unmet)


def test_an_orchestration_without_room_or_transfer_is_named() -> None:
    """A full decode pool, and a turn that is computed where it is."""
    scene = pair(policy="static", local_share=1.0, orchestration="concurrent")
    scene.beat(d0=0)
    full = scene.place(case())
    assert missed(full) == ("", "concurrent", Unmet.NO_DECODE_ROOM)
    scene.beat(d0=8)
    local = scene.place(case(1_100, session(), orchestration="decode_first"))
    assert local is not None and local.mode is Mode.LOCAL
    assert missed(local) == ("", "decode_first", Unmet.NOT_REMOTE)
    assert missed(scene.place(case(1_100, session()))) == MET, "the deployment's is for remote ones"


def test_the_decision_names_what_was_not_kept() -> None:
    """It is on the log, for `trivium explain` and everybody else."""
    on = pairs(P)
    on.request(
        "r1", policy="replica", orchestration="decode_first", sampling=Sampling(max_tokens=1)
    )
    (found,) = on.decisions
    told = found.policy, found.wished_policy, found.wished_orchestration, found.unmet
    assert told == ("static", "replica", "decode_first", Unmet.ONE_TOKEN)
    arrived, decided = steps_of(build_stories([on.accepted["r1"]], [found])["r1"])[:2]
    assert arrived.what.endswith("wishes policy replica, wishes orchestration decode_first")
    assert "wished replica and decode_first: one_token" in decided.details
