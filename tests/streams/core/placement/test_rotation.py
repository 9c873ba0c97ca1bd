"""The policies that look at no load: fixed pairs, and round robin."""

from itertools import product

import pytest

from schemas.records import Mode, Reason, Role, Unmet
from streams.core.requests.live import RequestCase
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session

POLICIES = ["pairs", "round_robin"]


def took(scene: PlacerFixture, request_case: RequestCase) -> tuple[str, str]:
    """Prefill and decode worker of a request that is dispatched."""
    placement = scene.take(request_case)
    assert placement.policy == (request_case.request.policy or scene.settings.policy)
    prefill = "" if placement.prefill is None else placement.prefill.worker_id
    return prefill, "" if placement.decode is None else placement.decode.worker_id


def test_pairs_policy_rotates_over_fixed_pairs() -> None:
    """The first goes with the first; a worker without a partner gets nothing."""
    scene = pair(3, 2, policy="pairs")
    worker_pairs = [took(scene, case(100 * number + 1)) for number in range(4)]
    assert worker_pairs == [("p0", "d0"), ("p1", "d1")] * 2


def test_round_robin_rotates_over_each_pool() -> None:
    """It does so however much work a worker has."""
    scene = pair(3, 2, policy="round_robin")
    worker_pairs = [took(scene, case(100 * number + 1)) for number in range(6)]
    assert worker_pairs == [(f"p{n % 3}", f"d{n % 2}") for n in range(6)]


@pytest.mark.parametrize(
    ("policy", "prefills"), [("pairs", ["p1", "p1"]), ("round_robin", ["p0", "p1"])]
)
def test_rotation_keeps_decode_worker_of_conversation(policy: str, prefills: list[str]) -> None:
    """Every turn is remote and uses up no other request's turn."""
    scene = pair(2, 2, policy=policy)
    later = [scene.take(case(1_100, session("d1"))) for _ in range(2)]
    assert [placement.mode for placement in later] == [Mode.REMOTE] * 2
    assert [placement.decode.worker_id for placement in later if placement.decode] == ["d1", "d1"]
    assert [placement.prefill.worker_id for placement in later if placement.prefill] == prefills
    assert {placement.reason for placement in later} == {Reason.SESSION_WORKER}
    assert took(scene, case())[1] == "d0"


@pytest.mark.parametrize("policy", POLICIES)
def test_rotation_skips_worker_without_room(policy: str) -> None:
    """Nothing waits while some worker has room."""
    scene = pair(2, 2, policy=policy)
    scene.beat(p0=0, d0=8)
    placement = scene.take(case(1_100, session("d0")))
    assert placement.prefill is not None and placement.prefill.worker_id == "p1"
    assert placement.decode is not None
    assert placement.decode.worker_id == ("d1" if policy == "pairs" else "d0")
    scene.beat(p1=0)
    assert scene.place(case()) is None


def test_pairs_policy_prefills_ahead_when_decode_is_full() -> None:
    """This is so where no pair has room on both sides."""
    scene = pair(2, 2, policy="pairs")
    scene.beat(d0=0, d1=0)
    assert [took(scene, case(n)) for n in (1, 2)] == [("p0", ""), ("p1", "")]
    assert scene.hand_over(case(), prefill="p1") == ("", Reason.NO_WORKER)
    scene.beat(d0=1)
    assert scene.hand_over(case(), prefill="p1") == ("", Reason.NO_WORKER), "it is no partner"
    assert scene.hand_over(case(), prefill="p0") == ("d0", Reason.PREFILL_DONE)


def test_round_robin_hands_over_to_placed_decode_worker() -> None:
    """If that one is full, the next in turn gets the request."""
    scene = pair(1, 3, policy="round_robin")
    assert [took(scene, case(n))[1] for n in (1, 2)] == ["d0", "d1"]
    assert scene.hand_over(case(), "p0", "d1")[0] == "d1"
    scene.beat(d1=0)
    assert [scene.hand_over(case(), "p0", "d1")[0] for _ in range(3)] == ["d2", "d0", "d2"]


def test_pairs_policy_skips_pair_with_lost_half() -> None:
    """Where no whole pair lives, any worker serves; a returning one finds its partner."""
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
def test_rotation_falls_back_to_replica_without_pool(policy: str, lacks: str) -> None:
    scene = pair(policy=policy)
    scene.workers(Role.REPLICA, "x0")
    scene.beat(**{lacks: -1})
    scene.pass_ms(3_000)
    placement = scene.take(case(1_100, session("d0")))
    assert (placement.mode, placement.decode) == (Mode.REPLICA, scene.worker("x0"))


def test_round_robin_rotates_over_replicas() -> None:
    """A conversation keeps its own replica."""
    scene = PlacerFixture(policy="round_robin")
    scene.workers(Role.REPLICA, "x0", "x1", "x2")
    assert [took(scene, case(n))[1] for n in range(1, 5)] == ["x0", "x1", "x2", "x0"]
    assert took(scene, case(1_100, session("x0")))[1] == "x0"
    assert took(scene, case(7))[1] == "x1"


def test_request_can_wish_for_rotation_policy() -> None:
    """A wish that cannot be met is named."""
    scene = pair(2, 2)
    assert took(scene, case(policy="pairs")) == ("p0", "d0")
    assert took(scene, case(1, policy="pairs")) == ("p1", "d1")
    only = PlacerFixture()
    only.workers(Role.REPLICA, "x0")
    placement = only.take(case(policy="pairs"))
    assert (placement.policy, placement.unmet_wishes.policy) == ("replica", "pairs")
    assert placement.unmet_wishes.unmet is Unmet.NO_WORKER


def test_round_robin_warms_next_worker_without_using_its_turn() -> None:
    scene = pair(2, 2, policy="round_robin")
    for _ in range(2):
        choice = scene.placer.computes(case(), scene.fleet, scene.now_ms)
        assert choice is not None and choice[0] is scene.worker("p0")
    scene.beat(p0=0, p1=0)
    assert scene.placer.computes(case(), scene.fleet, scene.now_ms) is None
