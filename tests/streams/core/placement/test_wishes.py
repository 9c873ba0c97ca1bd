"""A policy and an orchestration of the request's own: kept where they can be, named where not."""

from typing import Any

import pytest

from infra.story.steps import steps_of
from infra.story.story import build_stories
from schemas.records import Mode, Orchestration, Role, Sampling, Unmet
from streams.core.requests.live import Placement
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session
from tests.streams.core.router_setups import pairs

P, D, C = Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT


def missed(placement: Placement | None) -> tuple[str, str, Unmet]:
    assert placement is not None
    return (
        placement.unmet_wishes.policy,
        placement.unmet_wishes.orchestration,
        placement.unmet_wishes.unmet,
    )


MET = ("", "", Unmet.NONE)


def both(*, replica_window: int = 8, **settings: Any) -> PlacerFixture:
    """A pair and a replica."""
    scene = pair(**settings)
    scene.workers(Role.REPLICA, "r0", window=replica_window)
    return scene


@pytest.mark.parametrize(
    ("wish", "mode"), [("", Mode.LOCAL), ("replica", Mode.REPLICA), ("static", Mode.REMOTE)]
)
def test_request_chooses_its_policy(wish: str, mode: Mode) -> None:
    """A wished policy places the request instead of the deployment's."""
    scene = both(policy="conditional", local_share=0.0)
    placement = scene.place(case(1_100, session(), policy=wish))
    assert placement is not None
    assert (placement.mode, placement.policy) == (mode, wish or "conditional")
    assert missed(placement) == MET


@pytest.mark.parametrize(
    ("scene", "wish", "policy", "unmet"),
    [
        (pair(policy="static"), "replica", "static", Unmet.NO_WORKER),
        (both(replica_window=0, policy="static"), "replica", "static", Unmet.NO_WORKER),
        (pair(), "table", "learned", Unmet.UNKNOWN_POLICY),
        (pair(), "no-such", "learned", Unmet.UNKNOWN_POLICY),
    ],
)
def test_placer_names_unmet_policy_and_places_at_once(
    scene: PlacerFixture, wish: str, policy: str, unmet: Unmet
) -> None:
    """The deployment's policy places what the wished one cannot place now."""
    placement = scene.place(case(policy=wish))
    assert placement is not None and placement.policy == policy
    assert missed(placement) == (wish, "", unmet)


def test_placer_with_only_replicas_names_unmet_policy() -> None:
    """Not even a fallback keeps the wish."""
    scene = PlacerFixture()
    scene.workers(Role.REPLICA, "r0")
    placement = scene.place(case(policy="static"))
    assert placement is not None and placement.policy == "replica"
    assert missed(placement) == ("static", "", Unmet.NO_WORKER)


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
def test_request_chooses_its_orchestration(
    deployment: str, wish: str, expected: Orchestration
) -> None:
    """A wished orchestration runs instead of the deployment's."""
    placement = pair(orchestration=deployment).place(case(orchestration=wish))
    assert placement is not None and placement.orchestration is expected
    assert missed(placement) == MET


@pytest.mark.parametrize("of_request", [True, False])
@pytest.mark.parametrize(
    ("changes", "engines", "expected", "unmet"),
    [
        ({}, {"orchestrations": (P, C)}, C, Unmet.ENGINES_CANNOT),
        ({}, {"orchestrations": (P,)}, P, Unmet.ENGINES_CANNOT),
        ({"max_tokens": 1}, {}, P, Unmet.ONE_TOKEN),
    ],
)
def test_placer_names_unmet_orchestration(
    of_request: bool,
    changes: dict[str, Any],
    engines: dict[str, Any],
    expected: Orchestration,
    unmet: Unmet,
) -> None:
    """This holds for wishes of the request and of the deployment."""
    scene = PlacerFixture(orchestration="auto" if of_request else "decode_first")
    scene.workers(Role.PREFILL, "p0")
    scene.workers(Role.DECODE, "d0", **engines)
    wish: dict[str, Any] = {"orchestration": "decode_first"} if of_request else {}
    placement = scene.place(case(**changes, **wish))
    assert placement is not None and placement.orchestration is expected
    assert missed(placement) == ("", "decode_first", unmet)


def test_placer_names_orchestration_without_room_or_transfer() -> None:
    """The decode pool is full, or the turn is computed where its session is."""
    scene = pair(policy="static", local_share=1.0, orchestration="concurrent")
    scene.beat(d0=0)
    full = scene.place(case())
    assert missed(full) == ("", "concurrent", Unmet.NO_DECODE_ROOM)
    scene.beat(d0=8)
    local = scene.place(case(1_100, session(), orchestration="decode_first"))
    assert local is not None and local.mode is Mode.LOCAL
    assert missed(local) == ("", "decode_first", Unmet.NOT_REMOTE)
    assert missed(scene.place(case(1_100, session()))) == MET, "the deployment's is for remote ones"


def test_decision_names_unmet_wishes() -> None:
    """`trivium explain` reads it from the log."""
    on = pairs(P)
    on.request(
        "r1", policy="replica", orchestration="decode_first", sampling=Sampling(max_tokens=1)
    )
    (decision,) = on.decisions
    fields = decision.policy, decision.wished_policy, decision.wished_orchestration, decision.unmet
    assert fields == ("static", "replica", "decode_first", Unmet.ONE_TOKEN)
    arrived, decided = steps_of(build_stories([on.accepted["r1"]], [decision])["r1"])[:2]
    assert arrived.what.endswith("wishes policy replica, wishes orchestration decode_first")
    assert "wished replica and decode_first: one_token" in decided.details
