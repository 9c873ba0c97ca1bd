"""When a pool follows what it wants."""

from infra.scaling.hysteresis import PoolHysteresis
from infra.scaling.settings import ScalingSettings
from schemas.records import Role

DECODE = Role.DECODE
SETTINGS = ScalingSettings(up_after_ms=2_000, down_after_ms=10_000)


def followed(demands: list[int], present: int = 2) -> list[int]:
    """Return the pool's size second by second, where it has each target at once."""
    hysteresis, sizes = PoolHysteresis(SETTINGS), []
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
    hysteresis = PoolHysteresis(SETTINGS)
    for second in range(20):
        hysteresis.settle({DECODE: 1}, {DECODE: 1}, 1_000 * second)
    both = {DECODE: 1, Role.RETRIEVAL: 1}
    assert hysteresis.settle(both, {**both, Role.RETRIEVAL: 2}, 20_000)[Role.RETRIEVAL] == 2


def test_pool_follows_demand_after_clock_set_back() -> None:
    """Samples with a later time once stayed for good, and the pool stood still."""
    hysteresis = PoolHysteresis(SETTINGS)
    for second in range(20):
        hysteresis.settle({DECODE: 4}, {DECODE: 4}, 3_600_000 + 1_000 * second)
    sizes = [
        hysteresis.settle({DECODE: 6 if second < 5 else 1}, {DECODE: 4}, 1_000 * second)[DECODE]
        for second in range(20)
    ]
    assert sizes[:3] == [4, 4, 6] and sizes[-1] == 1
