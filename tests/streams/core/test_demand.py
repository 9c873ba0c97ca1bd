"""How many requests come, and what each of them takes, on average."""

import pytest

from streams.core.tables import MEMORY_MS, DecayingSums
from tests.streams.builders import T0


def counted(per_s: float, seconds: int, tokens: float = 10.0) -> DecayingSums:
    sums = DecayingSums("tokens")
    for number in range(int(per_s * seconds)):
        sums.add(T0 + int(number * 1_000 / per_s), tokens=tokens)
    return sums


@pytest.mark.parametrize("seconds", [3, 10, 60])
def test_demand_rate_is_right_after_any_duration(seconds: int) -> None:
    assert counted(8.0, seconds).per_s(T0 + 1_000 * seconds) == pytest.approx(8.0, rel=0.1)


def test_demand_forgets_old_requests() -> None:
    sums = counted(8.0, 30)
    assert sums.per_s(T0 + 30_000 + int(3 * MEMORY_MS)) < 0.5
    for number in range(300):
        sums.add(T0 + 30_000 + number * 100, tokens=30.0)
    assert sums.mean("tokens") == pytest.approx(30.0, rel=0.05)


def test_demand_is_zero_before_first_request() -> None:
    sums = DecayingSums("tokens")
    assert (sums.per_s(T0), sums.mean("tokens")) == (0.0, 0.0)


def test_demand_survives_clock_that_is_read_late() -> None:
    """A heartbeat may be stamped before the last event was."""
    sums = counted(8.0, 10)
    assert sums.per_s(T0) > 0
    sums.add(T0, tokens=10.0)
    assert sums.mean("tokens") == pytest.approx(10.0)
