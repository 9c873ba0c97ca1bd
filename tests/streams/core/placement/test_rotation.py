"""The policies that look at no load: fixed pairs, and round robin."""

from itertools import product

import pytest

from schemas.records import Mode, Reason, Role, Unmet
from streams.core.placement.case import RequestCase
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session

POLICIES = ["pairs", "round_robin"]


def took(scene: PlacerFixture, asked: RequestCase) -> tuple[str, str]:
    """Prefill and decode worker of a request that is dispatched."""
    found = scene.take(asked)
    assert found.policy == (asked.request.policy or scene.settings.policy)
    prefill = "" if found.prefill is None else found.prefill.worker_id
    return prefill, "" if found.decode is None else found.decode.worker_id


def test_pairs_are_fixed_and_come_in_turn() -> None:
    """The first with the first; who has no partner gets nothing."""
    scene = pair(3, 2, policy="pairs")
    found = [took(scene, case(100 * number + 1)) for number in range(4)]
    assert found == [("p0", "d0"), ("p1", "d1")] * 2


def test_round_robin_deals_both_pools_each_for_itself() -> None:
    """However much work a worker has."""
    scene = pair(3, 2, policy="round_robin")
    found = [took(scene, case(100 * number + 1)) for number in range(6)]
    assert found == [(f"p{n % 3}", f"d{n % 2}") for n in range(6)]


@pytest.mark.parametrize(
    ("policy", "prefills"), [("pairs", ["p1", "p1"]), ("round_robin", ["p0", "p1"])]
)
def test_a_conversation_keeps_its_decode_worker(policy: str, prefills: list[str]) -> None:
    """Every turn is remote, and takes nobody's turn."""
    scene = pair(2, 2, policy=policy)
    later = [scene.take(case(1_100, session("d1"))) for _ in range(2)]
    assert [each.mode for each in later] == [Mode.REMOTE] * 2
    assert [each.decode.worker_id for each in later if each.decode] == ["d1", "d1"]
    assert [each.prefill.worker_id for each in later if each.prefill] == prefills
    assert {each.reason for each in later} == {Reason.SESSION_WORKER}
    assert took(scene, case())[1] == "d0"


@pytest.mark.parametrize("policy", POLICIES)
def test_who_has_no_room_is_passed_over(policy: str) -> None:
    """And nothing waits while somebody has."""
    scene = pair(2, 2, policy=policy)
    scene.beat(p0=0, d0=8)
    found = scene.take(case(1_100, session("d0")))
    assert found.prefill is not None and found.prefill.worker_id == "p1"
    assert found.decode is not None
    assert found.decode.worker_id == ("d1" if policy == "pairs" else "d0")
    scene.beat(p1=0)
    assert scene.place(case()) is None


def test_a_pair_whose_decode_worker_is_full_computes_the_prompt_ahead() -> None:
    """Where no pair has room on both sides."""
    scene = pair(2, 2, policy="pairs")
    scene.beat(d0=0, d1=0)
    assert [took(scene, case(n)) for n in (1, 2)] == [("p0", ""), ("p1", "")]
    assert scene.hand_over(case(), prefill="p1") == ("", Reason.NO_WORKER)
    scene.beat(d0=1)
    assert scene.hand_over(case(), prefill="p1") == ("", Reason.NO_WORKER), "it is no partner"
    assert scene.hand_over(case(), prefill="p0") == ("d0", Reason.PREFILL_DONE)


def test_round_robin_hands_over_as_it_was_placed() -> None:
    """Else to whoever is next."""
    scene = pair(1, 3, policy="round_robin")
    assert [took(scene, case(n))[1] for n in (1, 2)] == ["d0", "d1"]
    assert scene.hand_over(case(), "p0", "d1")[0] == "d1"
    scene.beat(d1=0)
    assert [scene.hand_over(case(), "p0", "d1")[0] for _ in range(3)] == ["d2", "d0", "d2"]


def test_a_pair_without_its_other_half_serves_nothing() -> None:
    """But where no whole pair lives, whoever lives does; who comes back finds its own partner."""
    scene = pair(2, 2, policy="pairs")
    scene.beat(p0=-1)
    scene.pass_ms(3_000)
    assert took(scene, case()) == ("p1", "d1")
    assert scene.hand_over(case(), prefill="p0")[0] in ("d0", "d1")
    scene.beat(d1=-1)
    scene.pass_ms(3_000)
    assert took(scene, case()) == ("p1", "d0")
    scene.beat(p0=8, d1=8)
    assert took(scene, case(1_100, session("d1"))) == ("p1", "d1")


@pytest.mark.parametrize(("policy", "lacks"), list(product(POLICIES, ("p0", "d0"))))
def test_without_a_pool_somebody_serves(policy: str, lacks: str) -> None:
    """As with any policy."""
    scene = pair(policy=policy)
    scene.workers(Role.REPLICA, "x0")
    scene.beat(**{lacks: -1})
    scene.pass_ms(3_000)
    found = scene.take(case(1_100, session("d0")))
    assert (found.mode, found.decode) == (Mode.REPLICA, scene.worker("x0"))


def test_round_robin_deals_replicas_too() -> None:
    """A conversation keeps its own."""
    scene = PlacerFixture(policy="round_robin")
    scene.workers(Role.REPLICA, "x0", "x1", "x2")
    assert [took(scene, case(n))[1] for n in range(1, 5)] == ["x0", "x1", "x2", "x0"]
    assert took(scene, case(1_100, session("x0")))[1] == "x0"
    assert took(scene, case(7))[1] == "x1"


def test_one_request_may_wish_it() -> None:
    """And what cannot be so is named."""
    scene = pair(2, 2)
    assert took(scene, case(policy="pairs")) == ("p0", "d0")
    assert took(scene, case(1, policy="pairs")) == ("p1", "d1")
    only = PlacerFixture()
    only.workers(Role.REPLICA, "x0")
    found = only.take(case(policy="pairs"))
    assert (found.policy, found.unmet_wishes.policy) == ("replica", "pairs")
    assert found.unmet_wishes.unmet is Unmet.NO_WORKER


def test_a_beginning_is_computed_where_it_is_the_turn() -> None:
    """And nobody's turn is taken by that."""
    scene = pair(2, 2, policy="round_robin")
    for _ in range(2):
        found = scene.placer.computes(case(), scene.fleet, scene.now_ms)
        assert found is not None and found[0] is scene.worker("p0")
    scene.beat(p0=0, p1=0)
    assert scene.placer.computes(case(), scene.fleet, scene.now_ms) is None
