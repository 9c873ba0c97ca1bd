"""From the fleet to how many workers each pool gets."""

from infra.scaling.pools import PoolKey
from infra.scaling.scaler import PoolHysteresis, Scaler, ScalingPlan
from infra.scaling.settings import ScalingSettings
from schemas.fleet import FleetView
from schemas.records import Role, WantedPool
from tests.infra.scaling.samples import backlog, router_says
from tests.streams.builders import T0, beat, registration

PREFILL, DECODE = PoolKey(Role.PREFILL), PoolKey(Role.DECODE)
RETRIEVAL = PoolKey(Role.RETRIEVAL)
SETTINGS = ScalingSettings(up_after_ms=1_000, down_after_ms=60_000, workers_max=6)
SLOW_TO_SHRINK = ScalingSettings(up_after_ms=2_000, down_after_ms=10_000)


def wants(prefill: int, decode: int) -> ScalingPlan:
    counts = {PREFILL: prefill, DECODE: decode}
    pools = [
        WantedPool(role=pool.role, present=0, workers=count, work=0.0, why="")
        for pool, count in counts.items()
    ]
    return ScalingPlan([backlog()], pools)


def test_scaler_plans_pools_from_fleet_view() -> None:
    view, scaler = FleetView(), Scaler(SETTINGS)
    assert scaler.plan(view, T0) is None
    router_says(view, backlog())
    for number, role in enumerate((Role.PREFILL, Role.DECODE)):
        view.apply(registration(role.value, role, partition=number), number, T0)
        view.apply(beat(role.value, 1, {role: 8}, at_ms=T0), 9, T0)
    look = scaler.plan(view, T0)
    assert look is not None and look.backlogs == [backlog(model="tiny")]
    assert [pool.present for pool in look.pools] == [1, 1]
    assert look.counts == {PoolKey(Role.PREFILL, "tiny"): 2, PoolKey(Role.DECODE, "tiny"): 4}


def test_scaler_shrinks_pool_at_once_at_workers_max() -> None:
    scaler, present = Scaler(SETTINGS), {PREFILL: 4, DECODE: 2}
    for second in range(3):
        targets = scaler.settle(wants(2, 4), present, T0 + 1_000 * second)
    assert targets == {PREFILL: 2, DECODE: 4}


def test_scaler_shrinks_one_model_at_once_for_another_at_workers_max() -> None:
    a, b = PoolKey(Role.REPLICA, "a"), PoolKey(Role.REPLICA, "b")
    pools = [
        WantedPool(role=pool.role, model=pool.model, present=0, workers=3, work=0.0, why="")
        for pool in (a, b)
    ]
    scaler = Scaler(SETTINGS)
    for second in range(3):
        plan = ScalingPlan([backlog(model="a"), backlog(model="b")], pools)
        targets = scaler.settle(plan, {a: 5, b: 1}, T0 + 1_000 * second)
    assert targets == {a: 3, b: 3}


def test_scaler_shrinks_pool_late_below_workers_max() -> None:
    scaler, present = Scaler(SETTINGS), {PREFILL: 3, DECODE: 2}
    for second in range(3):
        targets = scaler.settle(wants(2, 3), present, T0 + 1_000 * second)
    assert targets == {PREFILL: 3, DECODE: 3}


def followed(demands: list[int], present: int = 2) -> list[int]:
    """Return the pool's size second by second, where it has each target at once."""
    hysteresis, sizes = PoolHysteresis(SLOW_TO_SHRINK), []
    for second, count in enumerate(demands):
        targets = hysteresis.settle({DECODE: count}, {DECODE: present}, 1_000 * second)
        present = targets[DECODE]
        sizes.append(present)
    return sizes


def test_pool_grows_after_sustained_demand() -> None:
    assert followed([2, 4, 4, 4, 5, 4]) == [2, 2, 2, 4, 4, 4]


def test_pool_grows_to_lowest_sustained_demand() -> None:
    assert followed([4, 6, 3]) == [2, 2, 3]


def test_pool_ignores_momentary_demand_peak() -> None:
    assert followed([2, 8, 2, 8, 8, 2]) == [2] * 6


def test_pool_shrinks_late_to_highest_recent_demand() -> None:
    assert followed([4, 1, 1, 3, *[1] * 8], present=4) == [4] * 11 + [3]


def test_pool_ignores_short_lull() -> None:
    assert followed([3, *[1] * 9, 3, *[1] * 9], present=3) == [3] * 20


def test_pool_shrinks_only_after_full_observation_window() -> None:
    assert followed([1] * 10, present=4) == [4] * 10
    assert followed([1] * 11, present=4) == [4] * 10 + [1]


def test_pool_added_later_waits_full_observation_window() -> None:
    hysteresis = PoolHysteresis(SLOW_TO_SHRINK)
    for second in range(20):
        hysteresis.settle({DECODE: 1}, {DECODE: 1}, 1_000 * second)
    both = {DECODE: 1, RETRIEVAL: 1}
    assert hysteresis.settle(both, {**both, RETRIEVAL: 2}, 20_000)[RETRIEVAL] == 2


def test_pool_follows_demand_after_clock_set_back() -> None:
    """Samples with a later time once stayed for good, and the pool stood still."""
    hysteresis = PoolHysteresis(SLOW_TO_SHRINK)
    for second in range(20):
        hysteresis.settle({DECODE: 4}, {DECODE: 4}, 3_600_000 + 1_000 * second)
    sizes = [
        hysteresis.settle({DECODE: 6 if second < 5 else 1}, {DECODE: 4}, 1_000 * second)[DECODE]
        for second in range(20)
    ]
    assert sizes[:3] == [4, 4, 6] and sizes[-1] == 1
