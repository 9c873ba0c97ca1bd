"""When a pool follows what it wants."""

from infra.scaling.hysteresis import PoolHysteresis
from infra.scaling.settings import ScalingSettings
from schemas.records import Role

DECODE = Role.DECODE
SETTINGS = ScalingSettings(up_after_ms=2_000, down_after_ms=10_000)


def followed(wanted: list[int], present: int = 2) -> list[int]:
    """The pool, second by second; it has at once what it is to have."""
    steady, found = PoolHysteresis(SETTINGS), []
    for second, count in enumerate(wanted):
        targets = steady.settle({DECODE: count}, {DECODE: present}, 1_000 * second)
        present = targets[DECODE]
        found.append(present)
    return found


def test_it_grows_once_the_need_has_lasted() -> None:
    assert followed([2, 4, 4, 4, 5, 4]) == [2, 2, 2, 4, 4, 4]


def test_it_grows_to_the_least_of_what_was_wanted() -> None:
    assert followed([4, 6, 3]) == [2, 2, 3]


def test_a_moments_need_starts_nothing() -> None:
    assert followed([2, 8, 2, 8, 8, 2]) == [2] * 6


def test_it_shrinks_late_and_to_the_most_of_what_was_wanted() -> None:
    assert followed([4, 1, 1, 3, *[1] * 8], present=4) == [4] * 11 + [3]


def test_a_lull_ends_nothing() -> None:
    assert followed([3, *[1] * 9, 3, *[1] * 9], present=3) == [3] * 20


def test_nothing_shrinks_before_the_need_is_known_for_so_long() -> None:
    assert followed([1] * 10, present=4) == [4] * 10
    assert followed([1] * 11, present=4) == [4] * 10 + [1]


def test_a_pool_that_comes_later_waits_as_long() -> None:
    steady = PoolHysteresis(SETTINGS)
    for second in range(20):
        steady.settle({DECODE: 1}, {DECODE: 1}, 1_000 * second)
    both = {DECODE: 1, Role.RETRIEVAL: 1}
    assert steady.settle(both, {**both, Role.RETRIEVAL: 2}, 20_000)[Role.RETRIEVAL] == 2


def test_it_follows_after_the_clock_was_set_back() -> None:
    """It stood still for as long: what was seen "later" never went."""
    steady = PoolHysteresis(SETTINGS)
    for second in range(20):
        steady.settle({DECODE: 4}, {DECODE: 4}, 3_600_000 + 1_000 * second)
    found = [
        steady.settle({DECODE: 6 if second < 5 else 1}, {DECODE: 4}, 1_000 * second)[DECODE]
        for second in range(20)
    ]
    assert found[:3] == [4, 4, 6] and found[-1] == 1
